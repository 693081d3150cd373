"""Values that a model wrote as plain text, typed by the tool's schema: "5" is a number where the schema says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from worker.parsers.partial_json import dumps, loads

_MAX_REFERENCES = 20  # followed in a row
_MAX_PARTS = 4  # of parts within parts that are looked into
_PARTS = ("allOf", "anyOf", "oneOf")
_NULLS = ("null", "None")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def property_types(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The JSON types that argument `key` may have; empty = any."""
    return _types(_declared(schema, key, schema or {}, 0), schema or {}, 0)


def property_words(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The strings that the schema names as values of argument `key`."""
    return _words(_declared(schema, key, schema or {}, 0), schema or {}, 0)


def typed(text: str, types: frozenset[str], words: frozenset[str] = frozenset()) -> str:
    """The JSON text of a value written as `text`: one of `words` as it stands, else the first reading that `types`
    allow, else a string."""
    if text.strip() in words:
        return dumps(text.strip())
    for read in (_as_json, _as_word, _as_literal):
        try:
            value = read(text.strip())
            if _type_of(value) & types or (not types and not isinstance(value, str)):
                # Where a string may come, "none" and "NULL" are strings like any other.
                if value is None and "string" in types and text.strip() not in _NULLS:
                    continue
                return dumps(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return dumps(text)


def _as_json(text: str) -> Any:
    return loads(text)


def _as_word(text: str) -> Any:
    if text.lower() not in _WORDS:
        raise ValueError(text)
    return _WORDS[text.lower()]


def _as_literal(text: str) -> Any:
    """Python's way of writing it: single quotes, True, None."""
    value = ast.literal_eval(text)
    if isinstance(value, str):
        raise ValueError("a string may as well be meant with its quotes")
    return value


def _type_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = {float: "number", list: "array", tuple: "array", dict: "object"}
    return frozenset({names.get(type(value), "")})  # never "string": that is the text as it stands


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    schema = resolved(schema, root)
    if not schema or depth > _MAX_REFERENCES:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared, "null"}) if schema.get("nullable") is True else frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    if values := listed_values(schema):
        return frozenset().union(*(frozenset({"string"}) if isinstance(v, str) else _type_of(v) for v in values))
    for keyword in _PARTS:
        if isinstance(options := schema.get(keyword), list):
            found = [_types(option, root, depth + 1) for option in options]
            if keyword != "allOf" and not all(found):
                return frozenset()  # one of them allows any type
            return frozenset().union(*found)
    return frozenset()


def _declared(schema: Any, key: str, root: Mapping[str, Any], depth: int) -> Any:
    """What the schema says of argument `key`, in whichever of its parts; None = nothing."""
    schema = resolved(schema, root)
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    found = (_declared(part, key, root, depth + 1) for part in _parts(schema) if depth < _MAX_PARTS)
    return next((declared for declared in found if declared is not None), None)


def _words(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    schema = resolved(schema, root)
    words = frozenset(value for value in listed_values(schema) if isinstance(value, str))
    return words.union(*(_words(part, root, depth + 1) for part in _parts(schema) if depth < _MAX_PARTS))


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """What the schema itself names as its values; none where it names none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of which `schema` is a choice or a combination."""
    for keyword in _PARTS:
        if isinstance(options := schema.get(keyword), list):
            yield from options


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that `schema`, a part of `root`, allows; empty = any."""
    return _types(schema, root, 0)


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that `schema` refers to, or itself; {} where there is none."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for step in reference[1:].split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}
