"""Calls as JSON objects, or one array of them, behind a marker. The formats of this kind differ only in markers."""

from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall, ToolParser


class JsonTags(ToolParser):
    def call(self, start: str) -> Steps[None]:
        yield from self.source.space()
        yield from self.object_calls()
        yield from self.end()


class JsonCalls(ToolParser):
    """No markers: the answer is the calls, as one JSON array. What a constrained answer looks like where the model's
    own format cannot be constrained."""

    shape = Shape('{"name": "NAME", "arguments": ', "}", first="[", between=", ", last="]")

    def bare(self) -> Steps[None]:
        yield from self.source.space()
        yield from self.object_calls(bare=True)

    def call(self, start: str) -> Steps[None]:
        raise NotACall
        yield
