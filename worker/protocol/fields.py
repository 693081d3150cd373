"""Field types of the request models: each says what a value may be and what a client reads when it is not.

`null` never arrives here: a request drops null fields first, so that null means absent everywhere.
Numbers are numbers: true is not 1 and "1" is not 1, but 5.0 is the integer 5 (some JSON libraries write all
numbers that way).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from worker.protocol.validation import kind, quote

MAX_TOKEN_IDS = 1024
INT64 = 2**63


def wrong(text: str, code: str = "invalid_value") -> PydanticCustomError:
    """The error of one field; its name is put in front of `text`."""
    return PydanticCustomError(code, text)


def wrong_type(expected: str, value: Any) -> PydanticCustomError:
    return wrong(f"must be {expected}, got {kind(value)}", "invalid_type")


def number(low: float | None = None, high: float | None = None, *, above: float | None = None) -> PlainValidator:
    """A finite number in [low, high], or in (above, high]."""
    text_low = f"({above:g}" if above is not None else f"[{low:g}" if low is not None else "(-inf"
    bounds = f"must be in {text_low}, {f'{high:g}]' if high is not None else 'inf)'}"

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type("a number", value)
        if not math.isfinite(value):
            raise wrong("must be a finite number")
        if (low is not None and value < low) or (above is not None and value <= above):
            raise wrong(f"{bounds}, got {quote(value)}", "decimal_below_min_value")
        if high is not None and value > high:
            raise wrong(f"{bounds}, got {quote(value)}", "decimal_above_max_value")
        return float(value)

    return PlainValidator(check)


def as_integer(value: Any) -> int:
    """`value` as an int, 5.0 included."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type("an integer", value)
    return value


def integer(low: int = -INT64, high: int = INT64 - 1) -> PlainValidator:
    """An integer in [low, high]."""

    def check(value: Any) -> int:
        result = as_integer(value)
        if result < low:
            raise wrong(f"must be at least {low}, got {quote(result)}", "integer_below_min_value")
        if result > high:
            raise wrong(f"must be at most {high}, got {quote(result)}", "integer_above_max_value")
        return result

    return PlainValidator(check)


def string(max_chars: int, *, min_chars: int = 0, without: str = "", printable: bool = False) -> PlainValidator:
    """Text of a bounded length, without some characters; `printable` allows only printable ASCII."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type("a string", value)
        if len(value) < min_chars:
            raise wrong("must not be empty", "empty_string")
        if len(value) > max_chars:
            raise wrong(f"must be at most {max_chars} characters long, got {len(value)}", "string_above_max_length")
        if any(char in value for char in without):
            raise wrong(f"must not contain any of {' '.join(repr(char) for char in without)}")
        if printable and not (value.isascii() and value.isprintable()):
            raise wrong("must be printable ASCII")
        return value

    return PlainValidator(check)


def choice(*allowed: str) -> PlainValidator:
    """One of some words."""

    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type("a string", value)
        if value not in allowed:
            raise wrong(f"must be one of {', '.join(allowed)}, got {quote(value)}")
        return value

    return PlainValidator(check)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_type("a boolean", value)
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type("an object", value)
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_type("an array of token ids", value)
    if len(value) > MAX_TOKEN_IDS:
        raise wrong(f"must have at most {MAX_TOKEN_IDS} entries, got {len(value)}", "array_above_max_length")
    ids = tuple(as_integer(item) for item in value)
    if ids and min(ids) < 0:
        raise wrong("must hold token ids, which are never negative", "integer_below_min_value")
    return ids


def strings(max_items: int, max_chars: int, *, single: bool = False) -> PlainValidator:
    """An array of non-empty strings, as a tuple; with `single`, one string stands for an array of it."""

    def check(value: Any) -> tuple[str, ...]:
        items = [value] if single and isinstance(value, str) else value
        if not isinstance(items, list):
            raise wrong_type("a string or an array of strings" if single else "an array of strings", value)
        if len(items) > max_items:
            raise wrong(f"must have at most {max_items} entries, got {len(items)}", "array_above_max_length")
        for item in items:
            if not isinstance(item, str):
                raise wrong_type("an array of strings only", item)
            if not item:
                raise wrong("must not contain an empty string", "empty_string")
            if len(item) > max_chars:
                raise wrong(f"must hold strings of at most {max_chars} characters", "string_above_max_length")
        return tuple(items)

    return PlainValidator(check)


def checked_by(check: Callable[[Any], Any]) -> PlainValidator:
    """A field whose own function validates it (and raises BadRequest with the exact path)."""
    return PlainValidator(check)


Flag = Annotated[bool, PlainValidator(_flag)]
Object = Annotated[dict[str, Any], PlainValidator(_object)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids)]
