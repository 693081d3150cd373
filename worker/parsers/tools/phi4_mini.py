"""Phi-4-mini: functools[{"name": ..., "arguments": {...}}]; others that write functools the same way."""

from worker.parsers.shape import Shape
from worker.parsers.tools.json_tags import JsonTags


class Phi4Mini(JsonTags):
    starts = ("functools", "<|tool_call|>")
    ends = ("<|/tool_call|>",)
    shape = Shape('{"name": "NAME", "arguments": ', "}", first="functools[", between=", ", last="]")
