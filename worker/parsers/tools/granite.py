"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]. The 20b model: <function_call> before each object.
Granite 4 writes as Hermes does."""

from worker.parsers.shape import Shape
from worker.parsers.tools.json_tags import JsonTags


class Granite(JsonTags):
    starts = ("<|tool_call|>", "<tool_call>", "<function_call>")
    ends = ("</tool_call>", "</function_call>")
    shape = Shape('{"name": "NAME", "arguments": ', "}", first="<|tool_call|>[", between=", ", last="]")
