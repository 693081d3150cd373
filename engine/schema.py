"""JSON schemas before they are compiled: what cannot be kept is refused by name and place, the rest is bounded.

The grammar engine implements a part of JSON Schema, ignores keywords it does not know, and overflows its stack on long
chains of references. So a schema is walked first: `bounded` refuses keywords that would not be enforced, broken shapes
and sizes beyond the limits, drops what enforces nothing, and sets the options that keep whitespace between tokens
bounded and give each object key one spelling. What it returns can be compiled; the output then validates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from engine.bounds import GrammarError, check_pattern, pattern_size
from engine.exact import check_values, with_exact_bounds
from engine.finite import endless_reference

MAX_DEPTH = 100  # nested brackets of the schema's JSON text
MAX_REFERENCES = 1000  # different references
MAX_REFERENCED_DEPTH = 8000  # different references x depth: what the compiler's recursion can reach
MAX_VALUES = 10_000  # enum values in all
MAX_PROPERTIES = 1000  # of one object
MAX_SCHEMAS = 10_000
MAX_MULTIPLE = 10_000  # of multipleOf, its digits read as an integer: the automaton counts remainders
MAX_WHITESPACE = 64

# Between tokens: nothing, or a new line and an indent. The whole is shorter than a run that anyone would call endless.
WHITESPACE = r"\n?[ \t]{0,14}"
# Every other character has one spelling in a string; with \/ and \uXXXX a declared key could come again as another.
_ESCAPES = '"\\bfnrt'
_LONE_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")
_URI_CHARACTERS = "/?%!$&'()*+,;=:@~-._"
_OPTIONS = "x-guidance"

TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")
# Formats of the standard that are not enforced. Names outside the standard are annotations, and dropped.
_UNSUPPORTED_FORMATS = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template "
    "json-pointer relative-json-pointer regex".split()
)
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())

# Keyword -> the values under which it demands nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$recursiveRef": (),
    "$dynamicRef": (),
}
_MEANINGLESS_ALONE = ("if", "then", "else", "minContains", "maxContains")  # without each other, without contains
_DROPPED = object()
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("additionalProperties", "items", "additionalItems")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def bounded(schema: Any) -> dict[str, Any]:
    """A copy of `schema` that can be compiled. Raises GrammarError with the place."""
    depth = _depth(schema)
    walk = _Walk()
    checked = walk.schema(schema, "")
    if len(walk.references) > MAX_REFERENCES or len(walk.references) * depth > MAX_REFERENCED_DEPTH:
        raise GrammarError(f"has too many references ({len(walk.references)}) for its depth ({depth})")
    if (where := endless_reference(checked, walk.references)) is not None:
        raise GrammarError("refers to what has no finite value: it must contain itself", where)
    if checked is False:
        raise GrammarError("false allows nothing")
    options = _options(schema.get(_OPTIONS) if isinstance(schema, dict) else None)
    return {**(checked if isinstance(checked, dict) else {}), _OPTIONS: options}


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """The subschemas of a schema with their paths."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            for name, child in value.items():
                yield f"/{keyword}/{name}", child
        elif (keyword in _LISTS or keyword == "items") and isinstance(value, list):
            for index, child in enumerate(value):
                yield f"/{keyword}/{index}", child
        elif keyword in _SINGLES:
            yield f"/{keyword}", value


class _Walk:
    """One pass over a schema, counting."""

    def __init__(self) -> None:
        self.references: dict[str, str] = {}  # with the place of the first use
        self._schemas = 0
        self._values = 0

    def schema(self, schema: Any, where: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"must be a schema (an object or a boolean), got {_kind(schema)}", where)
        self._schemas += 1
        if self._schemas > MAX_SCHEMAS:
            raise GrammarError(f"has more than {MAX_SCHEMAS} subschemas")
        if "if" in schema and ("then" in schema or "else" in schema):
            raise GrammarError("keyword 'if' is not supported", where)
        checked = {}
        for keyword, value in schema.items():
            if keyword in _UNSUPPORTED:
                if not any(value is nothing or value == nothing != 0 for nothing in _UNSUPPORTED[keyword]):
                    raise GrammarError(f"keyword {keyword!r} is not supported", where)
            elif keyword not in _MEANINGLESS_ALONE and keyword != _OPTIONS:
                value = self._keyword(keyword, value, f"{where}/{keyword}")
                if value is not _DROPPED:
                    checked[keyword] = value
        return with_exact_bounds(_without_trivial_minimum(checked, where))

    def _keyword(self, keyword: str, value: Any, where: str) -> Any:
        """The value to keep, or _DROPPED."""
        if keyword in _MAPS:
            return self._map(keyword, value, where)
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list) or not value:
                raise GrammarError(f"must be a non-empty array of schemas, got {_kind(value)}", where)
            return [self.schema(child, f"{where}/{index}") for index, child in enumerate(value)]
        if keyword in _SINGLES:
            return self.schema(value, where)
        if keyword in ("enum", "required"):
            return self._array(keyword, value, where)
        if keyword == "const":
            check_values(value, where)
        if keyword == "$ref":
            return self._reference(value, where)
        if keyword == "type":
            _check_type(value, where)
        elif keyword == "pattern":
            _check_pattern(value, where)
        elif keyword == "format":
            return _format(value, where)
        elif keyword in _COUNTS:
            if not _is_count(value):
                raise GrammarError(f"must be an integer of at least 0, got {_kind(value)}", where)
            return int(value)
        elif keyword in _NUMBERS:
            return _number(keyword, value, where)
        return value

    def _map(self, keyword: str, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise GrammarError(f"must be an object of schemas, got {_kind(value)}", where)
        if keyword == "properties" and len(value) > MAX_PROPERTIES:
            raise GrammarError(f"has more than {MAX_PROPERTIES} properties", where)
        if keyword == "patternProperties":
            for pattern in value:
                _check_pattern(pattern, f"{where}/{pattern}")
        if keyword == "properties":
            check_values(list(value), where)
        return {name: self.schema(child, f"{where}/{name}") for name, child in value.items()}

    def _array(self, keyword: str, value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise GrammarError(f"must be an array, got {_kind(value)}", where)
        if keyword == "required":
            if not all(isinstance(name, str) for name in value):
                raise GrammarError("must be an array of strings", where)
            return value
        if not value:
            raise GrammarError("must not be empty: it would allow nothing", where)
        self._values += len(value)
        if self._values > MAX_VALUES:
            raise GrammarError(f"the schema has more than {MAX_VALUES} enum values", where)
        check_values(value, where)
        return value

    def _reference(self, value: Any, where: str) -> str:
        """The reference as a URI has it: schema generators write names like "List[int]" into it as they are."""
        if not isinstance(value, str):
            raise GrammarError(f"must be a string, got {_kind(value)}", where)
        if not value.startswith("#"):
            raise GrammarError("only references inside the schema (#/...) are supported", where)
        if value[1:2] not in ("", "/"):
            raise GrammarError("references to an $anchor are not supported", where)
        reference = "#" + quote(_LONE_PERCENT.sub("%25", value[1:]), safe=_URI_CHARACTERS)
        self.references.setdefault(reference, where.removesuffix("/$ref"))
        return reference


def _without_trivial_minimum(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """minProperties counts different keys, the grammar counts entries: it holds only where `required` implies it."""
    least = schema.get("minProperties", 0)
    if not least:
        return {key: value for key, value in schema.items() if key != "minProperties"}
    if least > len(set(schema.get("required", ()))):
        raise GrammarError("'minProperties' is supported only up to the number of required properties", where)
    return {key: value for key, value in schema.items() if key != "minProperties"}


def _check_type(value: Any, where: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise GrammarError("must not be empty", where)
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            shown = repr(name[:40]) if isinstance(name, str) else _kind(name)
            raise GrammarError(f"must be one of {', '.join(TYPES)}, got {shown}", where)


def _check_pattern(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise GrammarError(f"must be a string, got {_kind(value)}", where)
    try:
        check_pattern(value)
    except GrammarError as error:
        raise GrammarError(error.message, where) from None


def _format(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        raise GrammarError(f"must be a string, got {_kind(value)}", where)
    if value in _UNSUPPORTED_FORMATS:
        raise GrammarError(f"format {value!r} is not supported", where)
    return value if value in FORMATS else _DROPPED


def _number(keyword: str, value: Any, where: str) -> Any:
    if isinstance(value, bool) and keyword.startswith("exclusive"):
        return value  # draft 4
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GrammarError(f"must be a number, got {_kind(value)}", where)
    if keyword == "multipleOf":
        digits = re.sub(r"e.*|[.]", "", f"{value!r}".removesuffix(".0").lower()).strip("0")
        if value <= 0 or int(digits or 0) > MAX_MULTIPLE:
            raise GrammarError(f"must be above 0 and have digits up to {MAX_MULTIPLE}", where)
    return value


def _options(given: Any) -> dict[str, Any]:
    """`x-guidance` at the root may narrow the whitespace between tokens; it cannot widen it."""
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES, "whitespace_pattern": WHITESPACE}
    if not isinstance(given, dict):
        return options
    if given.get("whitespace_flexible") is False:
        return {"json_allowed_escapes": _ESCAPES, "whitespace_flexible": False}
    if (pattern := given.get("whitespace_pattern")) is not None:
        check_whitespace(pattern)
        options["whitespace_pattern"] = pattern
    return options


def check_whitespace(pattern: Any) -> None:
    """Raises GrammarError unless `pattern` matches whitespace of JSON only, and not endlessly."""
    if not isinstance(pattern, str) or not pattern:
        raise GrammarError("must be a non-empty string")
    plain = re.sub(r"\{\d+(,\d+)?\}", "", pattern)
    if not re.fullmatch(r"(?:[ \n\r\t]|\\[nrt]|\\x20|[\[\]()|?:])*", plain):
        raise GrammarError("must be made of spaces, \\n, \\r, \\t, classes, groups, '?' and '{n,m}'")
    if pattern_size(pattern) > MAX_WHITESPACE:
        raise GrammarError(f"must not match more than {MAX_WHITESPACE} characters")


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value >= 0 and value == int(value)


def _depth(value: Any) -> int:
    """Of nested brackets. Raises GrammarError beyond MAX_DEPTH."""
    level, depth = [value], 0
    while level := [child for item in level if isinstance(item, dict | list) for child in _items(item)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise GrammarError(f"is nested more than {MAX_DEPTH} deep")
    return depth


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), "something else")
