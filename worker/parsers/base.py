"""The common shape of all output parsers: text in, deltas out.

    parser.feed(text) -> deltas       # whatever is decided by now; the rest is held back
    parser.close()    -> deltas       # the output is over: everything held comes out

What comes out never depends on how the text was cut into pieces. Nothing is swallowed: what turns out not to be a
call, or a call cut before its name was known, comes out as Content. A call is announced once, by a ToolCallStart
(its arguments are "" until then); the ToolCallArgs after it concatenate to the JSON text of its arguments.

Special tokens. Many formats are written with them, and they must not leak to clients. So:

- A parser names the markers it wants to see in `markers`. Whoever turns ids into text keeps the special tokens that
  occur in them (`wants`), and drops all others by id, as skip_special_tokens asks.
- What is left of such tokens in the text (a model wrote one where it means nothing) is removed by the pipeline.

Parsers know no token ids, requests or chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int  # 0, 1, ... in order of appearance
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArgs:
    index: int  # of a ToolCallStart that came before
    fragment: str  # never empty


Delta = Content | Reasoning | ToolCallStart | ToolCallArgs


class Parser(Protocol):
    """A state machine over one output. Not reusable."""

    markers: frozenset[str]  # texts that it must see even where they are special tokens

    def feed(self, text: str) -> list[Delta]: ...

    def close(self) -> list[Delta]: ...


def wants(parser: Parser, special_token: str) -> bool:
    """Whether the parser must see a special token of this text."""
    return any(special_token in marker for marker in parser.markers)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one kind (and call) put together: the form that no cutting changes."""
    merged: list[Delta] = []
    for delta in deltas:
        match (merged[-1] if merged else None), delta:
            case Content(before), Content(text):
                merged[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                merged[-1] = Reasoning(before + text)
            case ToolCallArgs(index, before), ToolCallArgs(same, fragment) if index == same:
                merged[-1] = ToolCallArgs(index, before + fragment)
            case _:
                merged.append(delta)
    return merged


class Trail:
    """The space at the end of a text, held back until something follows. Constant work per character."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, text: str) -> str:
        """-> what is no end any more: the space held so far and `text` without the space at its own end."""
        said = text.rstrip()
        if not said:
            self._parts.append(text)
            return ""
        before = self.take()
        self._parts.append(text[len(said) :])
        return before + said

    def take(self) -> str:
        """The held space, which is held no more."""
        space = "".join(self._parts)
        self._parts.clear()
        return space
