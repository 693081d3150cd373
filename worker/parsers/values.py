"""Values that a model wrote as plain text, typed by the tool's schema: "5" is a number where the schema says so."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from worker.parsers.partial_json import dumps, loads

_MAX_REFERENCES = 20  # followed in a row
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def property_types(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The JSON types that argument `key` may have; empty = any."""
    properties = _resolved(schema, schema or {}).get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(declared, schema or {}, 0)


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value written as `text`: the first reading that `types` allow, else a string."""
    for read in (_as_json, _as_word, _as_literal):
        try:
            value = read(text.strip())
            if _type_of(value) & types or (not types and not isinstance(value, str)):
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
    schema = _resolved(schema, root)
    if not schema or depth > _MAX_REFERENCES:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared, "null"}) if schema.get("nullable") is True else frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset().union(*(frozenset({"string"}) if isinstance(v, str) else _type_of(v) for v in values))
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(keyword), list):
            found = [_types(option, root, depth + 1) for option in options]
            if keyword != "allOf" and not all(found):
                return frozenset()  # one of them allows any type
            return frozenset().union(*found)
    return frozenset()


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
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
