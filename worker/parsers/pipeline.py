"""One parser out of two: reasoning first, then tool calls in what is not reasoning."""

from __future__ import annotations

from worker.parsers.base import Content, Delta, Parser, Reasoning
from worker.parsers.source import Machine, Steps


class Pipeline:
    """The Parser of a request. Without reasoning and tools it passes text on as content."""

    def __init__(
        self,
        *,
        reasoning: Parser | None = None,
        tools: Parser | None = None,
        hidden: tuple[str, ...] = (),
    ) -> None:
        """`hidden`: texts of special tokens, removed from content and reasoning."""
        self._stages = [parser for parser in (reasoning, tools) if parser is not None]
        self.markers = frozenset().union(*(parser.markers for parser in self._stages))
        self._hidden = hidden
        self._hiders: dict[type[Content] | type[Reasoning], _Hider] = {}

    @property
    def answering(self) -> bool:
        """Whether thoughts are known to be over: text that is still held is none."""
        return any(isinstance(stage, Machine) and stage.answering for stage in self._stages)

    def feed(self, text: str) -> list[Delta]:
        return self._finished(self._through(0, [Content(text)] if text else []))

    def close(self) -> list[Delta]:
        deltas: list[Delta] = []
        for index, stage in enumerate(self._stages):
            deltas += self._through(index + 1, stage.close())
        return self._finished(deltas) + self._shown_rest()

    def _through(self, first: int, deltas: list[Delta]) -> list[Delta]:
        """`deltas` through the stages from `first` on: each reads the content that the one before left."""
        for stage in self._stages[first:]:
            read: list[Delta] = []
            for delta in deltas:
                read += stage.feed(delta.text) if isinstance(delta, Content) else [delta]
            deltas = read
        return deltas

    def _finished(self, deltas: list[Delta]) -> list[Delta]:
        finished: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, Content | Reasoning):
                finished += self._shown(delta)
            else:
                finished += [*self._shown_rest(), delta]
        return finished

    def _shown(self, delta: Content | Reasoning) -> list[Delta]:
        if not self._hidden:
            return [delta]
        before = [] if type(delta) in self._hiders else self._shown_rest()
        hider = self._hiders.setdefault(type(delta), _Hider(self._hidden))
        return before + _texts(type(delta), hider.feed(delta.text))

    def _shown_rest(self) -> list[Delta]:
        rest: list[Delta] = []
        for kind, hider in self._hiders.items():
            rest += _texts(kind, hider.close())
        self._hiders.clear()
        return rest


def _texts(kind: type[Content] | type[Reasoning], deltas: list[Delta]) -> list[Delta]:
    return [kind(delta.text) for delta in deltas if isinstance(delta, Content)]


class _Hider(Machine):
    """Removes texts."""

    def __init__(self, hidden: tuple[str, ...]) -> None:
        self._texts = hidden
        super().__init__()

    def run(self) -> Steps[None]:
        while (yield from self.source.until(self._texts, self._say)) is not None:
            pass

    def _say(self, text: str) -> None:
        if text:
            self.emit(Content(text))
