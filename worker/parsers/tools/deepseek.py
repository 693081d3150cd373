"""DeepSeek V3, R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and a fenced JSON block. V3.1: NAME before the
separator, the bare JSON behind it."""

import re

from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall, ToolParser

_FENCE = "```json"
_LINE = re.compile(r"[^\n{]*")


class DeepSeek(ToolParser):
    opens = ("<｜tool▁calls▁begin｜>",)
    closes = ("<｜tool▁calls▁end｜>",)
    starts = ("<｜tool▁call▁begin｜>",)
    ends = ("<｜tool▁call▁end｜>", "```")
    inner = ("<｜tool▁sep｜>",)
    shape = Shape(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        first="<｜tool▁calls▁begin｜>",
        between="\n",
        last="<｜tool▁calls▁end｜>",
    )

    def call(self, start: str) -> Steps[None]:
        head: list[str] = []
        if (yield from self.source.until((*self.inner, *self.ends), head.append)) not in self.inner:
            raise NotACall
        name = "".join(head).strip()
        if name == "function" and (yield from self.source.peek()) != "{":
            name = (yield from self.source.run(_LINE)).strip()
            yield from self.source.space()
            if (yield from self.source.cut_off((_FENCE,))):
                raise NotACall
            yield from self.source.literal(_FENCE)
        yield from self.arguments_of(name)
        yield from self.end()  # of the fence
        yield from self.end()


class DeepSeekV31(DeepSeek):
    """Reads the same; constrained answers are written the newer way."""

    shape = Shape(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        first="<｜tool▁calls▁begin｜>",
        last="<｜tool▁calls▁end｜>",
    )
