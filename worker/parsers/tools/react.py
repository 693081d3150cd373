r"""ReAct, for models without a tool format of their own:

    Thought: ...
    Action: NAME
    Action Input: {...}
    Observation:            <- a stop string of such prompts; the caller's answer comes here

A call is read to its end before it is announced: what turns out not to be one comes out as text."""

import re

from worker.parsers.partial_json import loads
from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall, ToolParser

_INPUT = "Action Input:"
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class ReAct(ToolParser):
    starts = ("\nAction:",)
    trigger = "Action:"
    shape = Shape("Action: NAME\nAction Input: ", many=False)

    def bare(self) -> Steps[None]:
        yield from self.source.space()
        if not (yield from self.source.literal("Action:")):
            raise NotACall
        yield from self.call("")

    def call(self, start: str) -> Steps[None]:
        head: list[str] = []
        yield from self.source.until(("\n",), head.append)
        yield from self.source.space()
        if not (yield from self.source.literal(_INPUT)):
            raise NotACall
        body: list[str] = []
        end = yield from self.source.until(("\nObservation:", *self.starts), body.append)
        if end in self.starts:
            self.source.unread(end)
        text = "".join(body).strip()
        if fenced := _FENCE.fullmatch(text):
            text = fenced[1]
        text = "{}" if text in ("null", "None") else text
        try:
            if not isinstance(loads(text), dict):
                raise NotACall
        except ValueError:
            raise NotACall from None
        self.begin("".join(head).strip())
        self.args(text)
