"""What a template may use up: time, output and memory, checked from inside while it runs.

A template is a program, and not always ours. Every way in which one small expression makes a large value (repeating,
padding, joining, formatting, slicing, powers ...) and every way to go on for long (loops, calls) comes through here.
The current render's budget is a context variable, so renders in several threads do not see each other.
Knows nothing of chats; `templates.environment` puts these checks into the template language.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from templates.rendered import TemplateError

MAX_SECONDS = 5.0
MAX_RANGE = 20_000  # the longest range(); also the most messages of a chat, twice
MAX_INT_BITS = 4096
MAX_PADDING = 4096  # the widest field of a format, a center() or an indent()
MIN_VALUE_BYTES = 16 << 20  # the largest single value, and the largest prompt, unless the request itself is larger
TICKS_A_LOOK = 64  # looking at the clock costs more than counting


class LimitExceeded(TemplateError):
    """The template used more time or memory than a chat needs."""


class Budget:
    """What one render may still use. `input_chars`: the size of the request, since a prompt grows with it."""

    def __init__(self, input_chars: int = 0, seconds: float = MAX_SECONDS) -> None:
        self.max_bytes = max(MIN_VALUE_BYTES, 16 * input_chars)  # of one value
        self.left_bytes = 16 * self.max_bytes  # of all values made, together
        self.deadline = time.monotonic() + seconds
        self._ticks = 0

    def tick(self, size: int = 0) -> None:
        """One iteration or call, which appended `size` bytes of references to some buffer."""
        self._ticks += 1
        if size:
            self.spend(size)
        if self._ticks % TICKS_A_LOOK == 0 and time.monotonic() > self.deadline:
            raise LimitExceeded("the chat template runs for too long")

    def spend(self, size: int) -> None:
        self.left_bytes -= size
        if size > self.max_bytes or self.left_bytes < 0:
            raise LimitExceeded("the chat template makes a value that is too large")

    def check(self, size: int) -> None:
        """Whether a value of `size` bytes may be made, before it is made."""
        if size > self.max_bytes or size > self.left_bytes:
            raise LimitExceeded("the chat template makes a value that is too large")


_current: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


@contextmanager
def limited(budget: Budget) -> Iterator[Budget]:
    """What runs inside draws on `budget`."""
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)


def budget() -> Budget:
    """The budget of the render that is running. Outside of one (constant expressions are computed while a template
    is compiled) a fresh one, which bounds each single value."""
    return _current.get() or Budget()


def made(value: Any) -> Any:
    """`value`, accounted for. Raises LimitExceeded if it is too large, or one too many."""
    if isinstance(value, str | bytes):
        budget().spend(value.__sizeof__())
    elif isinstance(value, list | tuple | dict | set):
        budget().spend(64 * len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise LimitExceeded("the chat template makes a number that is too large")
    return value


def text_size(value: Any) -> int:
    """About the length of str(value), and the cost of walking through it. A container may hold the same value many
    times over, so this is asked before one becomes text or is compared; it stops at the budget's limit."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return 8
    current = budget()
    size, rest = 0, [value]
    while rest and size <= current.max_bytes and len(rest) <= current.max_bytes:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item) + 4
        elif isinstance(item, Mapping | list | tuple | set | frozenset):
            size += 32
            rest.extend(item.values() if isinstance(item, Mapping) else item)
            if isinstance(item, Mapping):
                rest.extend(item.keys())
            current.tick()
        else:
            size += 8
    return current.max_bytes + 1 if rest else size


def walkable(value: Any) -> Any:
    """`value`, which is about to be compared or hashed item by item."""
    if isinstance(value, Mapping | list | tuple):
        budget().check(text_size(value))
    return value


def printable(value: Any) -> Any:
    """`value`, which is about to become text: checked unless it is text already."""
    if not isinstance(value, str):
        budget().check(text_size(value))
    budget().tick()
    return value


class Ticking:
    """An iterable whose iterations are counted. `size` bytes of references are kept by one iteration."""

    def __init__(self, inner: Any, size: int) -> None:
        self._inner = inner
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        current = budget()
        for item in self._inner:
            current.tick(self._size)
            yield item

    def __len__(self) -> int:
        return len(self._inner)


def limited_range(*args: int) -> range:
    span = range(*args)
    if len(span) > MAX_RANGE:
        raise LimitExceeded(f"range() in the chat template is longer than {MAX_RANGE}")
    return span


def join(items: Any) -> str:
    """The items' texts put together, as `~`, macros and blocks do."""
    parts = [str(printable(item)) for item in items]
    budget().check(sum(map(len, parts)))
    return str(made("".join(parts)))


def binary(operator: str, plain: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """`left operator right` where the result may be much larger than both."""
    if operator == "*":
        for factor, value in ((left, right), (right, left)):
            if isinstance(factor, int) and isinstance(value, str | bytes | list | tuple):
                budget().check(max(factor, 0) * max(len(value), 1) * (1 if isinstance(value, str | bytes) else 8))
    elif operator == "**":
        if not isinstance(left, int | float) or not isinstance(right, int | float) or abs(right) > MAX_INT_BITS:
            raise LimitExceeded("the chat template makes a number that is too large")
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
            raise LimitExceeded("the chat template makes a number that is too large")
    elif operator == "%" and isinstance(left, str | bytes):
        check_percent_format(left, right)
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        budget().check(len(left) + len(right))
    return made(plain(left, right))


_WIDTHS = re.compile(r"\d+")


def check_percent_format(template: Any, arguments: Any) -> None:
    text = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    if re.search(r"%[^%a-zA-Z]*\*", text):
        raise LimitExceeded("a field width taken from a value is not allowed in a chat template's format")
    _check_format(text, text.count("%"), arguments)


def check_brace_format(template: str, arguments: Any) -> None:
    if re.search(r"\{[^{}]*:[^{}]*\{", template):
        raise LimitExceeded("a field width taken from a value is not allowed in a chat template's format")
    _check_format(template, template.count("{"), arguments)


def _check_format(text: str, fields: int, arguments: Any) -> None:
    widths = [int(width[:9]) for width in _WIDTHS.findall(text)]
    if max(widths, default=0) > MAX_PADDING:
        raise LimitExceeded(f"a field of a chat template's format is wider than {MAX_PADDING}")
    budget().check(len(text) + sum(widths) + fields * text_size(arguments))


def check_padding(*widths: Any) -> None:
    for width in widths:
        if isinstance(width, int) and abs(width) > MAX_PADDING:
            raise LimitExceeded(f"a padding in the chat template is wider than {MAX_PADDING}")


def check_replace(text: str, old: Any, new: Any) -> None:
    if len(str(new)) > len(str(old)):
        count = text.count(str(old)) if old != "" else len(text) + 1
        budget().check(len(text) + count * (len(str(new)) - len(str(old))))


def check_join(separator: str, items: Any) -> list[Any]:
    """The items as a list, since a generator can be read only once."""
    listed = [printable(item) for item in items]
    budget().check(sum(len(item) if isinstance(item, str) else text_size(item) for item in listed))
    budget().check(len(separator) * len(listed))
    return listed
