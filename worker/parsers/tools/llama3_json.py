"""Llama 3.1, 3.2, 3.3 and 4: {"name": ..., "parameters": {...}} as the whole answer, several with `;` between them,
<|python_tag|> before it or not."""

from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import ToolParser


class Llama3Json(ToolParser):
    starts = ("<|python_tag|>",)
    shape = Shape('{"name": "NAME", "parameters": ', "}", between="; ")

    def bare(self) -> Steps[None]:
        yield from self.source.space()
        yield from self.object_calls(bare=True)

    def call(self, start: str) -> Steps[None]:
        yield from self.bare()
