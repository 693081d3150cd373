"""One JSON array of all calls in a pair of tags: Jamba and Hunyuan (<tool_calls>), Nemotron (<TOOLCALL>), Cohere
(<|START_ACTION|>), Apertus and its kin."""

from worker.parsers.tool_parser import Shape
from worker.parsers.tools.json_tags import JsonTags


class ToolCalls(JsonTags):
    starts = ("<tool_calls>",)
    ends = ("</tool_calls>",)
    shape = Shape('{"name": "NAME", "arguments": ', "}", first="<tool_calls>[", between=", ", last="]</tool_calls>")


class Nemotron(JsonTags):
    starts = ("<TOOLCALL>",)
    ends = ("</TOOLCALL>",)
    shape = Shape('{"name": "NAME", "arguments": ', "}", first="<TOOLCALL>[", between=", ", last="]</TOOLCALL>")


class Cohere(JsonTags):
    starts = ("<|START_ACTION|>",)
    ends = ("<|END_ACTION|>",)
    shape = Shape(
        '{"tool_name": "NAME", "parameters": ', "}", first="<|START_ACTION|>[", between=", ", last="]<|END_ACTION|>"
    )
