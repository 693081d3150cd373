"""What one render knows beside its values: the time, and what stands between the template and the user's characters.

Context variables, so that renders in several threads do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Protocol


class Veil(Protocol):
    """What stands between a template and some characters of the values (`templates.shield.Shield`)."""

    def through(self, text: str, apply: Callable[[str], str]) -> str:
        """`apply` on the real characters, its result veiled again."""
        ...

    def seen(self, text: str, phrase: str) -> str:
        """`text` as it is compared with a phrase of the template."""
        ...


_now: ContextVar[datetime | None] = ContextVar("template_now", default=None)
_veil: ContextVar[Veil | None] = ContextVar("template_veil", default=None)


def now() -> datetime:
    return _now.get() or datetime.now()


def veil() -> Veil | None:
    return _veil.get()


@contextmanager
def clock(moment: datetime | None) -> Iterator[None]:
    """strftime_now() in templates rendered inside shows `moment` (None: the time it is)."""
    token = _now.set(moment)
    try:
        yield
    finally:
        _now.reset(token)


@contextmanager
def veiled(by: Veil | None) -> Iterator[None]:
    """Values rendered inside have stand-ins for some characters, which `by` knows."""
    token = _veil.set(by)
    try:
        yield
    finally:
        _veil.reset(token)


def through_veil(text: str, apply: Callable[[str], str]) -> str:
    current = _veil.get()
    return apply(text) if current is None else current.through(text, apply)
