"""Hermes, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated."""

from worker.parsers.shape import Shape
from worker.parsers.tools.json_tags import JsonTags


class Hermes(JsonTags):
    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    shape = Shape('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n")
