"""Whether what a schema refers to can ever be written to its end.

A property that is required and refers back to its own object has no finite value: {"a": {"a": {"a": ...}}}. Such a
schema compiles, and then has a model write until its last token. So it is refused. Knows only the keywords by which a
value must contain another one; what else a schema asks for is the compiler's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_NOT_FOUND = object()


def endless_reference(root: Any, references: Mapping[str, str]) -> str | None:
    """The place of a reference to what has no finite value; None if there is none. `references`: every "$ref" in
    `root`, with the place where it stands."""
    finite: set[str] = set()
    waiting: dict[str, set[str]] = {}  # by reference: those that were not finite for want of it
    unsure = list(references)
    while unsure:
        reference = unsure.pop()
        if reference in finite:
            continue
        values = _Values(finite)
        if values.exist(_resolved(root, reference)):
            finite.add(reference)
            unsure += waiting.pop(reference, ())
        for missing in values.missing:
            waiting.setdefault(missing, set()).add(reference)
    return next((where for reference, where in references.items() if reference not in finite), None)


class _Values:
    """Looks for finite values, given the references that are known to have one."""

    def __init__(self, finite: set[str]) -> None:
        self._finite = finite
        self.missing: set[str] = set()  # references that were looked at in vain

    def exist(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        if "const" in schema or "enum" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._finite:
            self.missing.add(reference)
            return False
        if not all(map(self.exist, schema.get("allOf") or ())):
            return False
        # Every option is looked at: each missing reference may be the one that is found later.
        if any(options and not any([self.exist(option) for option in options]) for options in _choices(schema)):
            return False
        return bool(_types(schema) - {"object", "array"}) or any(
            [
                "object" in _types(schema) and self._object_exists(schema),
                "array" in _types(schema) and self._array_exists(schema),
            ]
        )

    def _object_exists(self, schema: dict[str, Any]) -> bool:
        declared = schema.get("properties") or {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.exist(declared.get(name, others)) for name in schema.get("required") or ())

    def _array_exists(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        first, others = schema.get("prefixItems") or [], schema.get("items", True)
        if isinstance(others, list):  # the older name of prefixItems
            first, others = others, schema.get("additionalItems", True)
        return all(map(self.exist, first[:least])) and (least <= len(first) or self.exist(others))


def _choices(schema: dict[str, Any]) -> list[Any]:
    return [schema[keyword] for keyword in ("anyOf", "oneOf") if keyword in schema]


def _types(schema: dict[str, Any]) -> set[str]:
    declared = schema.get("type")
    if declared is None:
        return {"any", "object", "array"}
    return {declared} if isinstance(declared, str) else set(declared)


def _resolved(root: Any, reference: str) -> Any:
    """What a reference points to; anything, where the compiler will say that it points nowhere."""
    node = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(step, _NOT_FOUND)
        elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        else:
            return True
    return node
