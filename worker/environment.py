"""How one setting is declared, read from a mapping of strings, and shown. Knows no particular setting.

A dataclass declares its settings as fields made by `setting(...)`; `read` fills it, `example` renders its
.env.example and `describe` lists what was set, all from the same declaration.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from worker.errors import SettingsError, clip

# What consoles write into a field that was left alone.
UNSET_WORDS = ("", "none", "null")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_MASK = "***"
T = TypeVar("T")


@dataclass(frozen=True)
class Type:
    """`parse` raises ValueError with what was expected. `zero_unset`: "0" too means that the field was left alone."""

    parse: Callable[[str], Any]
    zero_unset: bool = False
    words: tuple[str, ...] = ()  # allowed words; one of them is never taken for an unset value


@dataclass(frozen=True)
class Setting:
    names: tuple[str, ...]  # environment variables, the documented one first
    of: Type
    group: str
    help: str
    secret: bool = False

    def shown(self, value: object) -> str:
        """`value` for a person to read, never a secret."""
        if self.secret:
            return _MASK if value else ""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, dict):
            return json.dumps(value)
        return ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


def setting(group: str, *names: str, of: Type, default: Any = None, help: str, secret: bool = False) -> Any:
    """A dataclass field that declares a setting. (Typed Any, so that the field can be annotated with its own type.)"""
    declared = Setting(names, of, group, help, secret)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata={"setting": declared}, repr=not secret)
    return dataclasses.field(default=default, metadata={"setting": declared}, repr=not secret)


def _text(value: str) -> str:
    return value


def _flag(value: str) -> bool:
    word = value.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"expected one of {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE


def _names(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise ValueError("expected a name, or several with commas between")
    return names


def _origins(value: str) -> tuple[str, ...]:
    # As browsers write them: no capitals, no slash at the end.
    origins = tuple(name.rstrip("/") for name in _names(value.lower()))
    return _each(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origins, "an origin such as http://localhost:5173")


def _hosts(value: str) -> tuple[str, ...]:
    form = r"\*|[\w.-]+|([0-9a-f]*:){2,}[0-9a-f.]*"
    return _each(form, _names(value.lower()), "a host name without scheme and port")


def _each(form: str, entries: tuple[str, ...], expected: str) -> tuple[str, ...]:
    if not all(re.fullmatch(form, entry) for entry in entries):
        raise ValueError(f"expected {expected}, or several with commas between, or *")
    return entries


def _header_text(value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise ValueError("expected printable ASCII, as a header can carry it")
    return value


def _json_object(value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("expected a JSON object") from None
    if not isinstance(parsed, dict):
        raise ValueError("expected a JSON object")
    return parsed


text = Type(_text, zero_unset=True)
secret_text = Type(_text)
flag = Type(_flag)
names = Type(_names)
origins = Type(_origins)
hosts = Type(_hosts)
secret_header = Type(_header_text)
json_object = Type(_json_object, zero_unset=True)


def integer(low: int, high: int = 2**63 - 1, *, zero_unset: bool = False, unset: tuple[int, ...] = ()) -> Type:
    """A whole number in [low, high]; those in `unset` give None."""

    def parse(value: str) -> int | None:
        expected = f"expected a whole number, at least {low}" + (f" and at most {high}" if high < 2**63 - 1 else "")
        try:
            parsed = int(value) if len(value) <= 20 else None
        except ValueError:
            parsed = None
        if parsed is not None and parsed in unset:
            return None
        if parsed is None or not low <= parsed <= high:
            raise ValueError(expected)
        return parsed

    return Type(parse, zero_unset)


def number(low: float, high: float, *, above: bool = False) -> Type:
    """A finite number in [low, high], or in (low, high] with `above`."""

    def parse(value: str) -> float:
        try:
            parsed = float(value)
        except ValueError:
            parsed = math.nan
        if not low <= parsed <= high or (above and parsed == low):
            raise ValueError(f"expected a number in {'(' if above else '['}{low:g}, {high:g}]")
        return parsed

    return Type(parse)


def word(*allowed: str, synonyms: Mapping[str, str] | None = None) -> Type:
    """One of some words, in any case."""
    known = {**{entry: entry for entry in allowed}, **(synonyms or {})}

    def parse(value: str) -> str:
        if value.lower() not in known:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return known[value.lower()]

    return Type(parse, zero_unset=True, words=tuple(known))


def is_unset(value: str | None, of: Type = secret_text) -> bool:
    """Whether this is what a variable holds when nobody meant to set it."""
    if value is None:
        return True
    stripped = value.strip().lower()
    return (stripped in UNSET_WORDS and stripped not in of.words) or (of.zero_unset and stripped == "0")


def declared(settings: type) -> Iterator[tuple[dataclasses.Field[Any], Setting]]:
    for entry in dataclasses.fields(settings):
        if "setting" in entry.metadata:
            yield entry, entry.metadata["setting"]


def read(settings: type[T], environ: Mapping[str, str], **rest: Any) -> T:
    """An instance filled from `environ`. Raises SettingsError with the variable's name and its value."""
    values = {entry.name: _read(declaration, environ, entry.default) for entry, declaration in declared(settings)}
    return settings(**{name: value for name, value in values.items() if value is not dataclasses.MISSING}, **rest)


def read_one(settings: type, name: str, environ: Mapping[str, str]) -> Any:
    """The value of one field of `settings`, where nothing else of it matters. Raises SettingsError."""
    entry, declaration = next(pair for pair in declared(settings) if pair[0].name == name)
    return _read(declaration, environ, entry.default)


def _read(declaration: Setting, environ: Mapping[str, str], default: Any) -> Any:
    given = {name: environ[name] for name in declaration.names if not is_unset(environ.get(name), declaration.of)}
    if len({value.strip() for value in given.values()}) > 1:
        pairs = " and ".join(f"{name}={declaration.shown(value)}" for name, value in given.items())
        raise SettingsError(f"{pairs} say different things: set only one of them")
    parsed = [_parse(declaration, name, value.strip()) for name, value in given.items()]
    return next((value for value in parsed if value is not None), default)


def _parse(declaration: Setting, name: str, value: str) -> Any:
    try:
        return declaration.of.parse(value)
    except ValueError as error:
        raise SettingsError(f"{name}={clip(declaration.shown(value), 200)}: {error}") from None


def describe(settings: Any) -> list[str]:
    """NAME=value of every setting that differs from its default, secrets masked."""
    defaults = type(settings)()
    return [
        f"{declaration.names[0]}={clip(declaration.shown(value), 200)}"
        for entry, declaration in declared(type(settings))
        if (value := getattr(settings, entry.name)) != getattr(defaults, entry.name)
    ]


def example(*classes: type) -> str:
    """The text of .env.example: every setting with its help, commented out, its default as the value."""
    lines = [
        "# All settings, with their defaults. Copy to .env and uncomment what you change.",
        "# Rendered from the code: python -m worker.settings > .env.example",
    ]
    group = ""
    for settings in classes:
        for entry, declaration in declared(settings):
            if declaration.group != group:
                group = declaration.group
                lines += ["", f"# --- {group} ---"]
            also = f" Also read: {', '.join(declaration.names[1:])}." if declaration.names[1:] else ""
            lines += ["", *textwrap.wrap(declaration.help + also, 110, initial_indent="# ", subsequent_indent="# ")]
            lines.append(f"#{declaration.names[0]}={declaration.shown(getattr(settings(), entry.name))}")
    return "\n".join(lines) + "\n"
