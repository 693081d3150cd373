"""One JSON array of all calls in a pair of tags: Jamba, Hunyuan, MiniMax M1 (<tool_calls>), Nemotron (<TOOLCALL>),
Cohere (<|START_ACTION|>; Command R+ a fenced block behind "Action:"), GigaChat (<|function_call|>)."""

from worker.parsers.shape import Shape
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


class CommandR(JsonTags):
    starts = ("Action: ```json", "Action:```json", "Action:\n```json")
    ends = ("```",)
    shape = Shape('{"tool_name": "NAME", "parameters": ', "}", first="Action: ```json\n[", between=", ", last="]```")


class GigaChat3(JsonTags):
    starts = ("<|function_call|>",)
    shape = Shape('<|function_call|>{"name": "NAME", "arguments": ', "}", many=False)
