"""Schemas of tools as schema generators write them, in the forms of calls: what a constraint writes is read back as
arguments that are right by the schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.unit.test_structured import driver, grammar, outputs, plan, read, refusal
from worker.plain_values import as_text

COLOUR = {"type": "string", "enum": ["red", "5", "none"], "title": "Colour"}
GENERATED = {  # optional fields, enumerations as classes, fields that are a choice of types
    "type": "object",
    "properties": {
        "colour": {"$ref": "#/$defs/Colour"},
        "other": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None},
        "described": {"allOf": [{"$ref": "#/$defs/Colour"}], "description": "A colour."},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Note"},
        "size": {"type": ["string", "integer"]},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["colour", "other", "described", "note", "size", "flag"],
    "additionalProperties": False,
    "$defs": {"Colour": COLOUR},
}
NO_TYPE = {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TAGGED = ("qwen3_coder", "glm45", "minimax_m2", "seed_oss")


def tool(parameters: Any, **function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters, **function}}]


def arguments(form: str, parameters: Any, rounds: int = 5, **body: Any) -> list[Any]:
    """Of all calls in random outputs, valid by the schema."""
    made = plan(form, **{"tools": tool(parameters), "tool_choice": "required", **body})
    calls = [call for text in outputs(made, rounds=rounds) for call in read(made, text)[2]]
    values = [json.loads(written) for _, written in calls]
    for value in values:
        assert isinstance(value, dict)
        jsonschema.validate(value, parameters)
    return values


@pytest.mark.parametrize("form", ["hermes", *TAGGED])
def test_what_schema_generators_write_is_kept(form: str) -> None:
    assert arguments(form, GENERATED)
    arguments(form, GENERATED, tools=tool(GENERATED, strict=True), tool_choice="auto")  # and not refused


@pytest.mark.parametrize("form", ["hermes", "mistral_v11", "json"])
@pytest.mark.parametrize("parameters", [{}, NO_TYPE, {"type": ["object", "null"], **NO_TYPE}], ids=str)
def test_arguments_are_an_object_though_the_schema_does_not_say_so(form: str, parameters: Any) -> None:
    assert arguments(form, parameters, rounds=8)


def test_a_property_that_is_required_and_not_declared_can_be_given() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "b"]}
    assert all({"a", "b"} <= set(value) for value in arguments("hermes", parameters))


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["array", "null"], "items": {}}])
def test_parameters_that_are_no_object_are_refused(parameters: Any) -> None:
    error = refusal(tools=tool(parameters), tool_choice="required")
    assert (error.param, error.code) == ("tools[0].function.parameters", "invalid_json_schema")


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"enum": ["km", "m", None, True, 5]}, ("km", "m", "null", "true", "5")),
        ({"anyOf": [{"const": "u"}, {"const": "v"}]}, ("u", "v")),
        ({"anyOf": [COLOUR, {"type": "null"}]}, ("red", "5", "none", "null")),
        ({"type": "boolean"}, ("false", "true")),
        ({"enum": ["null", None]}, None),  # which of them was meant?
        ({"enum": ["5", 5]}, None),
        ({"enum": ["", "a"]}, None),
        ({"enum": [" a"]}, None),
        ({"type": "string"}, "text"),
        ({"type": ["string", "null"], "description": "x"}, "text"),
        ({"oneOf": [{"type": "string"}, {"type": "object"}]}, "text"),
        ({"type": "string", "maxLength": 5}, None),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 5}]}, None),
        ({"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}]}, None),
        ({"type": "integer", "maximum": 5}, "json"),
        ({"anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}]}, "json"),
        ({"$ref": "#/$defs/Colour"}, ("red", "5", "none")),
        ({"$ref": "#/$defs/Loop"}, None),
        ({}, None),
    ],
)
def test_what_can_be_plain_text(schema: Any, written: Any) -> None:
    root = {"$defs": {"Colour": COLOUR, "Loop": {"$ref": "#/$defs/Loop"}}}
    assert as_text(schema, root) == written


PING = {
    "type": "object",
    "properties": {"word": {"enum": ["blue"]}},
    "required": ["word"],
    "additionalProperties": False,
}


def _json(key: str, name: str = "name") -> str:
    return json.dumps({name: "f", key: {"word": "red"}})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("granite", f"<tool_call>{_json('arguments')}</tool_call>"),
        ("granite", f"<function_call>{_json('arguments')}"),
        ("qwen3_coder", "<function=f>\n<parameter=word>\nred\n</parameter>\n</function>"),
        ("minimax_m2", '<invoke name="f"><parameter name="word">red</parameter></invoke>'),
        ("seed_oss", "Well. <function=f><parameter=word>red</parameter></function>"),
        ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"word": "red"}<｜tool▁call▁end｜>'),
        ("llama3_json", f"<|python_tag|>{_json('parameters')}"),
        ("llama3_json", f"[{_json('parameters')}]"),
        ("json", _json("arguments")),
        ("phi4_mini", f"<|tool_call|>[{_json('arguments')}]<|/tool_call|>"),
        ("command_r", f"Action:```json\n[{_json('parameters', 'tool_name')}]```"),
        ("internlm", f"<|action_start|> <|plugin|>{_json('parameters')}<|action_end|>"),
    ],
)
def test_a_strict_tool_cannot_be_called_in_another_way(form: str, text: str) -> None:
    """Parsers read more ways of writing a call than the one that is constrained: the others cannot be written."""
    made = plan(form, tools=tool(PING, strict=True))
    assert read(made, text)[2], "it would be read as a call"
    assert not driver(False).takes(grammar(made), text)
    for harmless in ("Just text, with <tags> and [brackets].", ""):
        assert driver(False).takes(grammar(made), harmless)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_hundreds_of_tools_can_be_constrained(form: str) -> None:
    """A grammar of many alternatives is large, and no bomb: nothing in it is repeated."""
    many = [entry for number in range(300) for entry in tool(PING, name=f"a_tool_with_a_name_{number}", strict=True)]
    made = plan(form, tools=many, tool_choice="required", parallel_tool_calls=False)
    ((name, arguments),) = read(made, outputs(made, rounds=1)[0])[2]
    assert name.startswith("a_tool_with_a_name_") and json.loads(arguments) == {"word": "blue"}
    assert plan(form, tools=many).grammar is not None
