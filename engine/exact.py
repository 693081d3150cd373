"""Values and bounds of a schema as the grammar engine keeps them: it reads numbers as doubles and writes decimals.

A value (`const`, `enum`) that would come out as another one is refused. A bound is moved inwards to the next number
that is kept, so that whatever is written still satisfies the bound as it was given.
"""

from __future__ import annotations

import math
import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from engine.bounds import GrammarError

MAX_EXACT = 2**53
# Beyond these the engine makes no range.
_MAX_INTEGER, _MAX_NUMBER = 2**63 - 1024, 10**18
_DIGITS = 15  # of a decimal, that a double always keeps
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_BOUNDS = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}  # moves up


def check_values(value: Any, where: str) -> None:
    """Raises GrammarError for strings (keys included) that could only be written with \\uXXXX, and for numbers that
    would be written as others."""
    if isinstance(value, str) and _CONTROL.search(value):
        raise GrammarError("control characters in values and names are not supported", where)
    if isinstance(value, int | float) and not _is_exact(value):
        raise GrammarError(f"the number {value!r:.40} has too many digits to be kept exactly", where)
    if isinstance(value, dict):
        check_values(list(value), where)
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_values(child, where)


def _is_exact(value: int | float) -> bool:
    """Whether the engine reads and writes exactly this number."""
    if isinstance(value, int):
        return abs(value) <= MAX_EXACT
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    significand, power = float(int("".join(map(str, digits)))), float(f"1e{abs(exponent)}")
    read = significand * power if exponent >= 0 else significand / power
    return read == abs(value)


def with_exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with bounds that the engine keeps."""
    types = schema.get("type")
    integer = "number" not in types and "integer" in types if isinstance(types, list) else types == "integer"
    moved = {
        keyword: (_integer if integer else _number)(schema[keyword], up)
        for keyword, up in _BOUNDS.items()
        if keyword in schema and not isinstance(schema[keyword], bool)
    }
    return {**schema, **moved}


def _integer(bound: int | float, up: bool) -> int | float:
    """Of integers: any double is kept."""
    if abs(bound) <= MAX_EXACT:
        return bound
    limit = -_MAX_INTEGER if up else _MAX_INTEGER
    bound = max(int(bound), limit) if up else min(int(bound), limit)
    double = float(bound)
    if (int(double) < bound) if up else (int(double) > bound):
        double = math.nextafter(double, math.inf if up else -math.inf)
    return int(double)


def _number(bound: int | float, up: bool) -> int | float:
    """Of numbers: the engine counts in decimal digits."""
    if (bound < -_MAX_NUMBER) if up else (bound > _MAX_NUMBER):
        return -_MAX_NUMBER if up else _MAX_NUMBER
    if bound == int(bound) and abs(bound) <= MAX_EXACT:
        return bound
    context = Context(prec=_DIGITS, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    given = Decimal(repr(bound))
    rounded = context.plus(given)
    if isinstance(bound, float):
        return float(rounded)
    return int(context.next_plus(rounded) if up else context.next_minus(rounded))  # the double nearest to it is inside
