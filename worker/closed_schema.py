"""JSON schemas whose objects have no properties but those that are named. Knows nothing of requests or tools."""

from __future__ import annotations

from typing import Any

# Keywords whose values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples"})
# Where one of them stands beside properties, the object is declared in more than one place.
_COMBINE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "dependentSchemas"})


def closed(schema: Any) -> Any:
    """The schema in which an object has no properties but those that are named, unless it says that it may."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: value if key in _DATA else closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(schema.get("properties"), dict) else inner


def can_be_closed(schema: Any) -> bool:
    """Whether each object is declared in one place, so that closing it takes away nothing that another place names, or
    that must be there."""
    if isinstance(schema, list):
        return all(map(can_be_closed, schema))
    if not isinstance(schema, dict):
        return True
    if ("properties" in schema and not _COMBINE.isdisjoint(schema)) or len(schema.get("allOf") or ()) > 1:
        return False
    declared, required = schema.get("properties"), schema.get("required")
    if isinstance(declared, dict) and isinstance(required, list) and any(name not in declared for name in required):
        return False
    return all(map(can_be_closed, schema.values()))
