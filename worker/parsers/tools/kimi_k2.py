"""Kimi K2: <|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>. The text before
the arguments is the call's id, and goes back into the prompt as such."""

import re

from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall, ToolParser

_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?", re.DOTALL)


class KimiK2(ToolParser):
    opens = ("<|tool_calls_section_begin|>",)
    closes = ("<|tool_calls_section_end|>",)
    starts = ("<|tool_call_begin|>",)
    ends = ("<|tool_call_end|>",)
    inner = ("<|tool_call_argument_begin|>",)
    shape = Shape(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        first="<|tool_calls_section_begin|>",
        last="<|tool_calls_section_end|>",
        many=False,  # the index counts up
    )

    def new_id(self, name: str) -> str:
        return f"functions.{name}:{self.count}"

    def call(self, start: str) -> Steps[None]:
        head: list[str] = []
        if (yield from self.source.until((*self.inner, *self.ends), head.append)) not in self.inner:
            raise NotACall
        call_id = "".join(head).strip()
        match = _ID.fullmatch(call_id)
        if match is None:
            raise NotACall
        yield from self.arguments_of(match["name"], call_id)
        yield from self.end()
