"""Which values can be written as plain text, so that what is read back (`parsers.values.typed`) is right by the schema.

as_text({"enum": ["km", "m"]}, root)                             ->  ("km", "m")      exactly these texts
as_text({"type": ["string", "null"]}, root)                      ->  "text"           any text
as_text({"type": "integer", "maximum": 9}, root)                 ->  "json"           the JSON text of a value
as_text({"type": "string", "pattern": "^a"}, root)               ->  None             cannot be kept

Knows schemas; nothing of grammars or formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from worker.parsers.partial_json import dumps
from worker.parsers.values import listed_values, resolved, schema_types, typed

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_MAX_DEPTH = 8  # of choices within choices
_MAX_OPTIONS = 1000


def as_text(declared: Any, root: Mapping[str, Any]) -> tuple[str, ...] | Literal["text", "json"] | None:
    """How values of the schema `declared`, a part of `root`, can be written."""
    options = list(_options(declared, root, 0))[: _MAX_OPTIONS + 1]
    if not options or len(options) > _MAX_OPTIONS or any(option is None for option in options):
        return None
    schemas = [option for option in options if option is not None]
    finite = [_values(schema) for schema in schemas]
    if all(values is not None for values in finite):
        return _texts([value for values in finite for value in values or ()])
    types = [schema_types(schema, root) for schema in schemas]
    if not all(types):
        return None
    if not any("string" in these for these in types):
        return "json"
    free = any("string" in these and values is None for these, values in zip(types, finite, strict=True))
    unlimited = all(
        set(schema) <= ANNOTATIONS | {"type"} or all(isinstance(value, str) for value in values or (0,))
        for schema, values in zip(schemas, finite, strict=True)
    )
    return "text" if free and unlimited else None


def _options(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any] | None]:
    """The schemas among which `schema` is a choice; None where it is more than that."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        yield None
        return
    said = set(schema) - ANNOTATIONS
    if said == {"$ref"}:
        yield from _options(resolved(schema, root), root, depth + 1)
    elif len(said) == 1 and (keyword := next(iter(said))) in ("anyOf", "oneOf", "allOf"):
        choices = schema[keyword]
        if not isinstance(choices, Sequence) or not choices or (keyword == "allOf" and len(choices) > 1):
            yield None
            return
        for choice in choices:
            yield from _options(choice, root, depth + 1)
    else:
        yield schema


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values of the schema, if it lists them."""
    if not set(schema) <= ANNOTATIONS | {"type", "enum", "const"}:
        return None
    if schema.get("type") == "null":
        return [None]
    if schema.get("type") == "boolean" and not {"enum", "const"} & set(schema):
        return [False, True]
    return listed_values(schema) or None


def _texts(values: list[Any]) -> tuple[str, ...] | None:
    """What is written for each value; None where that would be read as another."""
    words = frozenset(value for value in values if isinstance(value, str))
    types = frozenset({"string", "null", "boolean", "integer", "number", "array", "object"})
    texts = []
    for value in values:
        text = value if isinstance(value, str) else dumps(value)
        if not text or text != text.strip() or typed(text, types, words) != dumps(value):
            return None
        texts.append(text)
    return tuple(dict.fromkeys(texts))
