"""Calls whose arguments stand one by one between tags, as plain text: they become one JSON object.

An argument that can only be a string streams as it comes. Any other is read to its end, and typed by the schema.
"""

from __future__ import annotations

from typing import ClassVar

from worker.parsers.partial_json import dumps, escape, loads
from worker.parsers.source import Steps
from worker.parsers.tool_parser import ToolParser, Tools
from worker.parsers.values import property_types, property_words, typed


class ParameterParser(ToolParser):
    """Base of the formats that tag each argument."""

    # A value stands on lines of its own, so that a new line before its end is none of it.
    in_lines: ClassVar[bool] = False

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._name = ""
        self._given = 0

    def begin_object(self, name: str) -> None:
        """Announces a call; its arguments follow by `argument`."""
        self.begin(name)
        self._name, self._given = name, 0
        self.args("{")

    def end_object(self) -> None:
        self.args("}")

    def argument(self, key: str, ends: tuple[str, ...], *, kind: str | None = None) -> Steps[str | None]:
        """One argument, up to the first of `ends`. New lines around the value, one on each side, are not part of it.
        `kind`: what the model says that it is, "string" or "json". -> the end; None if the text ended before: the
        object stays open."""
        types = property_types(self.tools[self._name], key)
        in_lines = (yield from self.source.literal("\n")) or self.in_lines
        self.args((", " if self._given else "") + dumps(key) + ": ")
        self._given += 1
        stops = (*(f"\n{end}" for end in ends), *ends) if in_lines else ends
        if kind == "string" or (kind is None and types == {"string"}):
            self.args('"')
            end = yield from self.source.until(stops, lambda text: self.args(escape(text)), drop_cut=True)
            if end is not None:
                self.args('"')
        else:
            parts: list[str] = []
            end = yield from self.source.until(stops, parts.append)
            if end is not None:
                words = property_words(self.tools[self._name], key)
                self.args(_value("".join(parts), types, words, kind))
        return end.removeprefix("\n") if end is not None else None


def _value(text: str, types: frozenset[str], words: frozenset[str], kind: str | None) -> str:
    if kind == "json":
        try:
            return dumps(loads(text))
        except ValueError:
            pass
    return typed(text, types, words)
