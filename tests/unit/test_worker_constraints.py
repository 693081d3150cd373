"""Constraints in the words of other servers: honoured or refused by name, never left out in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.errors import BadRequest
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**body: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.parse({"messages": MESSAGES, **body})


def refusal(**body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        chat(**body)
    return refused.value


@pytest.mark.parametrize("type", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_is_kept(type: str) -> None:
    constraint = chat(response_format={"type": type, "schema": SCHEMA}).constraint
    assert constraint is not None and constraint.spec.kind == "json_schema"
    assert json.loads(constraint.spec.source) == SCHEMA
    assert refusal(response_format={"type": type, "schema": []}).param == "response_format.schema"


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": 5, "schema": SCHEMA}}, "json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": "yes", "schema": SCHEMA}},
            "json_schema.strict",
        ),
        ({"type": "json_schema", "json_schema": {"description": [], "schema": SCHEMA}}, "json_schema.description"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(format: Any, param: str) -> None:
    assert refusal(response_format=format).param == f"response_format.{param}"


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
        {"grammar": 'root ::= "a"'},
        {"json_schema": SCHEMA},
        {"guided_decoding": {"json": SCHEMA}},
        {"structural_tag": "{}"},
    ],
)
def test_fields_of_other_servers_are_not_ignored(fields: dict[str, Any]) -> None:
    (name,) = fields
    for request in (chat, lambda **body: CompletionRequest.parse({"prompt": "Hi", **body})):
        with pytest.raises(BadRequest) as refused:
            request(**fields)
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
    assert chat(**{name: None}).constraint is None
