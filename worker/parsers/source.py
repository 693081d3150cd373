"""Text that arrives in pieces, read as if it were whole.

A parser is written as one function from the beginning of the output to its end. Where it needs more text it yields,
and goes on when there is some: so it can be read like an ordinary parser, and no decision ever rests on where a piece
happened to end. `Steps[T]` is such a function that ends with a T.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from worker.parsers.base import Content, Delta

T = TypeVar("T")
Steps = Generator[None, None, T]

# Text that may be read again is kept in parts of this size: going back a little must not cost a copy of it all.
_KEPT_CHARS = 1000
# How much may be read again in vain: so many characters, and so many for each that was read.
_PATIENCE, _PATIENCE_PER_CHAR = 5_000, 4


class Source:
    """The text not yet read. Methods that are Steps wait for text; the others look at what is there."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._begin = 0  # position of _text[0] in the whole
        self._kept: list[str] = []  # what was read before _text, back to the first mark
        self._marks: list[int] = []  # positions in the whole
        self._reread = 0
        self.ended = False  # nothing follows what is there

    @property
    def exhausted(self) -> bool:
        """Whether so much was read in vain that nothing more should be tried: the work stays linear in the text."""
        return self._reread > _PATIENCE + _PATIENCE_PER_CHAR * (self._begin + self._at)

    def push(self, text: str) -> None:
        if not self._marks:
            self._kept.clear()
        elif self._at:
            read = self._text[: self._at]
            self._kept += [read[i : i + _KEPT_CHARS] for i in range(0, len(read), _KEPT_CHARS)]
        self._text = self._text[self._at :] + text
        self._begin += self._at
        self._at = 0

    def more(self) -> Steps[bool]:
        """Waits for a piece; False at the end."""
        if self.ended:
            return False
        yield
        return True

    def peek(self, size: int = 1) -> Steps[str]:
        """The next `size` characters, fewer only at the end; they stay unread."""
        while len(self._text) - self._at < size and (yield from self.more()):
            pass
        return self._text[self._at : self._at + size]

    def take(self, size: int) -> str:
        """Reads characters that were peeked at."""
        self._at += size
        return self._text[self._at - size : self._at]

    def rest(self) -> str:
        """Reads all that is there."""
        return self.take(len(self._text) - self._at)

    def one_of(self, texts: tuple[str, ...]) -> Steps[str | None]:
        """Reads the longest of `texts` that comes next, if any does."""
        for text in sorted(texts, key=len, reverse=True):
            if (yield from self._comes(text)):
                return self.take(len(text))
        return None

    def literal(self, text: str) -> Steps[bool]:
        """Reads `text` if it comes next."""
        return (yield from self.one_of((text,))) is not None

    def space(self) -> Steps[str]:
        """Reads whitespace."""
        return (yield from self.run(_SPACE))

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads as many characters as match `pattern` (of the form `[class]*`)."""
        parts: list[str] = []
        yield from self.copy_run(pattern, parts.append)
        return "".join(parts)

    def copy_run(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Steps[None]:
        """Gives `emit` as many characters as match `pattern`, as they come."""
        while True:
            match = pattern.match(self._text, self._at)
            emit(self.take(len(match[0]) if match else 0))
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def until(
        self, stops: tuple[str, ...], emit: Callable[[str], None], *, drop_cut: bool = False
    ) -> Steps[str | None]:
        """Reads up to and including the first of `stops`, and gives the text before it to `emit` as it comes, except
        what may yet become a stop. -> the stop, None at the end of the text. `drop_cut`: the beginning of a stop at the
        end of the text is read, but not given to `emit`."""
        pattern = _any_of(stops)
        while True:
            start = self._unsure(stops)
            found = pattern.search(self._text, self._at)
            if found and (self.ended or found.start() < start):
                emit(self.take(found.start() - self._at))
                return self.take(len(found[0]))
            emit(self.take(start - self._at))
            if not (yield from self.more()):
                rest = self.rest()
                emit("" if drop_cut else rest)
                return None

    def cut_off(self, texts: tuple[str, ...]) -> Steps[bool]:
        """Whether the text ends within one of `texts`, or right before it. What is there of it is read."""
        longest = max(map(len, texts), default=0)
        rest = yield from self.peek(longest)
        if len(rest) < longest and any(text.startswith(rest) for text in texts):
            self.take(len(rest))
            return True
        return False

    def mark(self) -> None:
        """Remembers this place: `rewind` or `forget` it."""
        self._marks.append(self._begin + self._at)

    def rewind(self) -> None:
        mark = self._marks.pop()
        self._reread += self._begin + self._at - mark
        self._reach(mark)
        self._at = mark - self._begin

    def forget(self) -> None:
        if self._marks:
            self._marks.pop()

    def since_mark(self) -> str:
        mark = self._marks[-1]
        self._reach(mark)
        return self._text[mark - self._begin : self._at]

    def commit(self) -> None:
        """Forgets all marks: what was read is settled, and need not be kept."""
        self._marks.clear()

    def unread(self, text: str) -> None:
        """Puts back what was read last, without a wait since."""
        self._at -= len(text)

    def _reach(self, position: int) -> None:
        """Puts what was kept from `position` on back before the text."""
        parts = [self._text]
        while self._begin > position:
            parts.append(self._kept.pop())
            self._begin -= len(parts[-1])
            self._at += len(parts[-1])
        self._text = "".join(reversed(parts))

    def _comes(self, text: str) -> Steps[bool]:
        """Waits only as long as what is there could still become `text`."""
        while len(there := self._text[self._at : self._at + len(text)]) < len(text):
            if not text.startswith(there) or not (yield from self.more()):
                return False
        return there == text

    def _unsure(self, stops: tuple[str, ...]) -> int:
        """Where a stop may begin that is not there as a whole."""
        end = len(self._text)
        first = max(self._at, end - max(map(len, stops), default=1) + 1)
        for start in range(first, end):
            tail = self._text[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in stops):
                return start
        return end


_SPACE = re.compile(r"\s*")


@lru_cache(maxsize=256)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


class Machine(ABC):
    """A Parser that is written as one function, `run`."""

    markers: frozenset[str] = frozenset()
    answering = False  # thoughts have ended, and no others have begun

    def __init__(self) -> None:
        self.source = Source()
        self._out: list[Delta] = []
        self._steps = self.run()
        self._running = True

    @abstractmethod
    def run(self) -> Steps[None]:
        """Reads the source to its end, calling `emit`."""

    def emit(self, delta: Delta) -> None:
        self._out.append(delta)

    def feed(self, text: str) -> list[Delta]:
        self.source.push(text)
        return self._advance()

    def close(self) -> list[Delta]:
        self.source.ended = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        if self._running:
            try:
                next(self._steps)
            except StopIteration:
                self._running = False
        if not self._running and (rest := self.source.rest()):
            self.emit(Content(rest))
        out, self._out = self._out, []
        return out
