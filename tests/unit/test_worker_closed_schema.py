"""Arguments that a tool does not name are not written; what a schema says of itself, or says in two places, stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.grammar_driver import GrammarDriver, driver
from worker import lark
from worker.closed_schema import can_be_closed, closed
from worker.parsers.registry import FORMATS
from worker.tool_grammar import Form, must_call

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
PET = {"type": "object", "properties": {"cat": {"type": "boolean"}}}


def test_objects_are_closed_at_every_depth_but_data_is_not_touched() -> None:
    schema = {"$defs": {"City": CITY}, "anyOf": [{"$ref": "#/$defs/City"}, {"type": "array", "items": CITY}]}
    shut = {**CITY, "additionalProperties": False}
    assert closed(schema) == {
        "$defs": {"City": shut},
        "anyOf": [{"$ref": "#/$defs/City"}, {"type": "array", "items": shut}],
    }
    for said in ({**CITY, "additionalProperties": True}, {"type": "object"}, {"const": {"properties": {}}}):
        assert closed(said) == said


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (CITY, True),
        ({"properties": {"home": {"allOf": [{"$ref": "#/$defs/City"}]}}, "$defs": {"City": CITY}}, True),
        ({"anyOf": [CITY, PET]}, True),
        ({"allOf": [CITY, PET]}, False),
        ({**CITY, "anyOf": [PET, {"required": ["city"]}]}, False),
        ({**CITY, "$ref": "#/$defs/Pet", "$defs": {"Pet": PET}}, False),
        ({"type": "array", "items": {"allOf": [CITY, PET]}}, False),
    ],
)
def test_an_object_that_is_declared_in_two_places_cannot_be_closed(schema: Any, expected: bool) -> None:
    assert can_be_closed(schema) is expected


@pytest.fixture(scope="module")
def drive() -> GrammarDriver:
    return driver()


@pytest.mark.parametrize(
    ("schema", "more_allowed"),
    [(CITY, False), ({**CITY, "additionalProperties": True}, True), ({"allOf": [CITY, PET]}, True)],
)
def test_a_call_has_the_named_arguments_only(drive: GrammarDriver, schema: Any, more_allowed: bool) -> None:
    shape = FORMATS["json"].shape
    assert shape is not None
    expression = must_call(Form("json", shape), {"f": schema}, {}, many=False)
    spec = lark.grammar(expression.text, *expression.rules)
    written = shape.first + shape.before.replace("NAME", "f") + "{}" + shape.after + shape.last
    for arguments, allowed in (({"city": "Rome"}, True), ({"city": "Rome", "days": 3}, more_allowed)):
        text = written.replace("{}", json.dumps(arguments))
        assert drive.takes(drive.grammar(spec.kind, spec.source), text) is allowed, text
