"""Outputs that can be nothing but calls, since a constraint had them written: tool_choice required, or a named tool.

What the format's own parser leaves as text is then no text: it is space between calls, or the beginning of a call that
was cut. That call comes out as far as it went, once its name is whole; of a name that is not, nothing comes out.
"""

from __future__ import annotations

from worker.parsers.base import Content, Delta, ToolCallArgs, ToolCallStart
from worker.parsers.shape import Shape
from worker.parsers.tool_parser import ToolParser


class ForcedCalls:
    """The Parser around that of the format."""

    def __init__(self, parser: ToolParser, shape: Shape) -> None:
        """`shape`: how the constraint has calls written."""
        self.markers = parser.markers
        self._parser = parser
        self._shape = shape
        self._text: list[str] = []  # since the last call

    def feed(self, text: str) -> list[Delta]:
        return self._calls(self._parser.feed(text))

    def close(self) -> list[Delta]:
        return self._calls(self._parser.close()) + self._cut_call()

    def _calls(self, deltas: list[Delta]) -> list[Delta]:
        calls: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content):
                self._text.append(delta.text)
            else:
                self._text.clear()
                calls.append(delta)
        return calls

    def _cut_call(self) -> list[Delta]:
        shape, parser = self._shape, self._parser
        text = "".join(self._text).lstrip()
        for before in (shape.first, shape.between):
            text = text.removeprefix(before.lstrip()).lstrip()
        opening, _, behind = shape.before.partition("NAME")
        if not text.startswith(opening):
            return []
        text = text.removeprefix(opening)
        # A character behind the name shows that it is whole: one name may be the beginning of another.
        name = next((name for name in parser.tools if text.startswith(name + behind[0])), None)
        if name is None:
            return []
        call: list[Delta] = [ToolCallStart(parser.count, parser.new_id(name), name)]
        text = text.removeprefix(name)
        if shape.parameter is None and text.startswith(behind) and (arguments := text.removeprefix(behind)):
            call.append(ToolCallArgs(parser.count, arguments))
        return call
