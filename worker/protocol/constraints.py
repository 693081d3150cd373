"""response_format, structured_outputs and the older guided_* fields -> at most one constraint on the text.

Only the shape is checked here; whether a schema, pattern or grammar can be compiled is engine.grammar's word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import orjson

from engine.grammar import GrammarError, check_whitespace
from engine.messages import GrammarSpec
from worker.closed_schema import closed
from worker.protocol.validation import check_json, fail, kind, quote

MAX_SOURCE_CHARS = 1_000_000
MAX_CHOICES = 1000

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
WHITESPACE = "guided_whitespace_pattern"
_NO_OPTIONS = ("disable_fallback", "backend", "_backend")  # other servers', which choose among grammar engines
# Options of structured_outputs that narrow what JSON may look like.
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class Constraint:
    spec: GrammarSpec
    param: str  # the field it came from, for errors of the compiler


def normal_constraint(fields: dict[str, Any]) -> Constraint | None:
    """The one constraint among `fields` (the request's response_format, structured_outputs and guided_*)."""
    pattern = fields.get(WHITESPACE)
    found = [
        constraint
        for name, value in fields.items()
        if name != WHITESPACE
        and (constraint := _RESPONSE[name](value) if name in _RESPONSE else _guided(name, value)) is not None
    ]
    if len(found) > 1:
        fail(found[1].param, f"cannot be combined with {found[0].param}: give one constraint")
    if pattern is None or not found:
        return found[0] if found else None
    return replace(found[0], spec=_narrowed(found[0].spec, {"whitespace_pattern": pattern}, ""))


def _response_format(value: Any) -> Constraint | None:
    param = "response_format"
    if not isinstance(value, dict):
        fail(param, f"must be an object with a type, got {kind(value)}", "invalid_type")
    format_type = value.get("type")
    if format_type == "text":
        return None
    if format_type not in ("json_object", "json_schema"):
        fail(f"{param}.type", f"must be one of text, json_object, json_schema, got {quote(format_type)}")
    json_schema = value.get("json_schema")
    if value.get("schema") is not None and json_schema is None:  # as llama.cpp and its clients write it
        return Constraint(_schema(value["schema"], f"{param}.schema"), param)
    if format_type == "json_object":
        if json_schema is not None:
            fail(f"{param}.json_schema", "needs the type json_schema")
        return Constraint(GrammarSpec("json_object", ""), param)
    if not isinstance(json_schema, dict):
        fail(f"{param}.json_schema", "is required where type is json_schema", "missing_required_parameter")
    for key, wanted in (("name", str), ("description", str), ("strict", bool)):
        if json_schema.get(key) is not None and not isinstance(json_schema[key], wanted):
            text = f"must be {'a boolean' if wanted is bool else 'a string'}, got {kind(json_schema[key])}"
            fail(f"{param}.json_schema.{key}", text, "invalid_type")
    if json_schema.get("schema") is None:
        fail(f"{param}.json_schema.schema", "is required", "missing_required_parameter")
    return Constraint(_schema(json_schema["schema"], f"{param}.json_schema.schema"), param)


def _structured_outputs(value: Any) -> Constraint | None:
    param = "structured_outputs"
    if not isinstance(value, dict):
        fail(param, f"must be an object, got {kind(value)}", "invalid_type")
    given = {key: entry for key, entry in value.items() if entry is not None and entry is not False}
    if "structural_tag" in given:
        fail(f"{param}.structural_tag", "is not supported", "unsupported_parameter")
    unknown = next((key for key in given if key not in (*_KINDS, *_JSON_OPTIONS, *_NO_OPTIONS)), None)
    if unknown is not None:
        fail(f"{param}.{unknown[:64]}", f"is not known: it must be one of {', '.join(_KINDS)}", "unknown_parameter")
    kinds = [key for key in _KINDS if key in given]
    if len(kinds) != 1:
        fail(param, f"must hold exactly one of {', '.join(_KINDS)}, got {', '.join(kinds) or 'none'}")
    constraint = _constraint(kinds[0], given[kinds[0]], f"{param}.{kinds[0]}")
    options = {option: given[option] for option in _JSON_OPTIONS if option in given}
    return replace(constraint, spec=_narrowed(constraint.spec, options, f"{param}."))


def _narrowed(spec: GrammarSpec, options: dict[str, Any], path: str) -> GrammarSpec:
    """A JSON constraint with the options written into its schema, where the grammar engine looks for them."""
    if not options:
        return spec
    if spec.kind not in ("json_schema", "json_object"):
        fail(f"{path}{next(iter(options))}" if path else WHITESPACE, "needs a constraint to JSON")
    schema = orjson.loads(spec.source) if spec.source else {"type": "object"}
    if "disable_additional_properties" in options:
        schema = closed(schema)
    if "disable_any_whitespace" in options:
        schema["x-guidance"] = {"whitespace_flexible": False}
    elif "whitespace_pattern" in options:
        pattern = options["whitespace_pattern"]
        try:
            check_whitespace(pattern)
        except GrammarError as error:
            fail(f"{path}whitespace_pattern" if path else WHITESPACE, error.message)
        schema["x-guidance"] = {"whitespace_pattern": pattern}
    return GrammarSpec("json_schema", orjson.dumps(schema).decode())


def _guided(name: str, value: Any) -> Constraint | None:
    return None if value is False else _constraint(GUIDED[name], value, name)


_RESPONSE = {"response_format": _response_format, "structured_outputs": _structured_outputs}


def _constraint(of: str, value: Any, param: str) -> Constraint:
    if of == "json":
        return Constraint(_schema(value, param), param)
    if of == "json_object":
        if value is not True:
            fail(param, f"must be a boolean, got {kind(value)}", "invalid_type")
        return Constraint(GrammarSpec("json_object", ""), param)
    if of == "choice":
        return Constraint(GrammarSpec("choice", orjson.dumps(_choices(value, param)).decode()), param)
    return Constraint(GrammarSpec({"regex": "regex", "grammar": "lark"}[of], _source(value, param)), param)


def _source(value: Any, param: str) -> str:
    if not isinstance(value, str):
        fail(param, f"must be a string, got {kind(value)}", "invalid_type")
    if not value:
        fail(param, "must not be empty", "empty_string")
    if len(value) > MAX_SOURCE_CHARS:
        fail(param, f"must be at most {MAX_SOURCE_CHARS} characters long", "string_above_max_length")
    return value


def _schema(value: Any, param: str) -> GrammarSpec:
    """A schema as an object, or as the text of one."""
    if isinstance(value, str):
        try:
            value = orjson.loads(_source(value, param))
        except orjson.JSONDecodeError as error:
            fail(param, f"is not valid JSON: {error}", "invalid_json_schema")
        if isinstance(value, dict):
            check_json(value)
    if not isinstance(value, dict):
        fail(param, f"must be a JSON schema (an object), got {kind(value)}", "invalid_json_schema")
    source = orjson.dumps(value).decode()
    if len(source) > MAX_SOURCE_CHARS:
        fail(param, f"must be at most {MAX_SOURCE_CHARS} characters long", "string_above_max_length")
    return GrammarSpec("json_schema", source)


def _choices(value: Any, param: str) -> list[str]:
    if not isinstance(value, list):
        fail(param, f"must be an array of strings, got {kind(value)}", "invalid_type")
    if not value:
        fail(param, "must not be empty", "empty_array")
    if len(value) > MAX_CHOICES:
        fail(param, f"must have at most {MAX_CHOICES} entries, got {len(value)}", "array_above_max_length")
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item:
            fail(f"{param}[{index}]", "must be a non-empty string", "invalid_type")
    return value
