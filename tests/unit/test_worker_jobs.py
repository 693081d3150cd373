"""Job inputs: every accepted shape gives an operation, every other one clear error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.strategies import any_json
from worker.errors import MAX_MESSAGE_CHARS, BadRequest, MethodNotAllowed, RouteNotFound, WorkerError
from worker.jobs import NATIVE_MAX_TOKENS, SHAPES, Native, Operation, parse
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        ("/v1/chat/completions", "chat"),
        ("/chat/completions", "chat"),
        ("v1/chat/completions/", "chat"),
        ("/openai/v1/chat/completions", "chat"),
        ("/v1/completions", "completions"),
        ("/v1/chat/completions/render", "render"),
        ("/v1/completions/render", "render_completions"),
        ("/tokenize", "tokenize"),
        ("/v1/detokenize", "detokenize"),
        ("/v1/models", "models"),
        ("/v1/models/", "models"),
        ("/models?limit=3", "models"),
        ("/health", "health"),
        ("/metrics", "metrics"),
        ("/version", "version"),
    ],
)
def test_routes_with_and_without_their_prefix(route: str, kind: str) -> None:
    assert parse({"openai_route": route, "openai_input": {}}).kind == kind
    assert parse({"route": route, "body": {}, "method": "POST"}).kind == kind


@pytest.mark.parametrize("rest", [{}, {"openai_input": {}}, {"openai_input": None}])
def test_models_with_or_without_a_body(rest: dict[str, Any]) -> None:
    assert parse({"openai_route": "/v1/models", **rest}) == Operation("models")


@pytest.mark.parametrize("route", ["/v1/models/org/m", "/v1/models/org%2Fm", "/models/org/m/"])
def test_one_model_by_an_id_with_slashes(route: str) -> None:
    assert parse({"openai_route": route}) == Operation("model", model_id="org/m")


def test_a_body_without_a_route_is_chat() -> None:
    assert parse({"openai_input": {"messages": USER}}) == Operation("chat", {"messages": USER})


def test_the_generic_shape() -> None:
    assert parse({"route": CHAT, "body": {"messages": USER}}) == Operation("chat", {"messages": USER})
    assert parse({"route": "/v1/models", "method": "GET"}) == Operation("models")
    assert parse({"route": "/reset_prefix_cache", "method": "POST"}).kind == "reset_prefix_cache"


def test_a_stream_is_a_boolean_true_on_a_route_that_generates() -> None:
    for value, expected in ((True, True), (False, False), (None, False), ("false", False), (1, False)):
        assert parse({"openai_route": CHAT, "openai_input": {"messages": USER, "stream": value}}).stream is expected
    assert parse({"openai_route": "/tokenize", "openai_input": {"prompt": "a", "stream": True}}).stream is False


@pytest.mark.parametrize(
    ("job_input", "param"),
    [
        ({"openai_route": CHAT}, "openai_input"),
        ({"route": CHAT, "method": "POST"}, "body"),
        ({"openai_route": CHAT, "openai_input": []}, "openai_input"),
        ({"openai_route": CHAT, "openai_input": "text"}, "openai_input"),
        ({"openai_route": 5, "openai_input": {}}, "openai_route"),
        ({"route": CHAT, "body": {}, "method": 5}, "method"),
        ({"prompt": "a", "sampling_params": []}, "sampling_params"),
        ({"prompt": "a", "apply_chat_template": "true"}, "apply_chat_template"),
        ({"messages": USER, "use_openai_format": 1}, "use_openai_format"),
        ({"prompt": "a", "max_batch_size": 0}, "max_batch_size"),
        ({"prompt": "a", "max_batch_size": "5"}, "max_batch_size"),
        ({"prompt": "a", "min_batch_size": 1.5}, "min_batch_size"),
        ({"prompt": "a", "batch_size_growth_factor": float("nan")}, "batch_size_growth_factor"),
        ({"prompt": "a", "sampling_params": {"nope": 1}}, "sampling_params.nope"),
    ],
)
def test_a_bad_part_is_named(job_input: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse(job_input)
    assert error.value.param == param and param in error.value.message


@pytest.mark.parametrize(
    "job_input", [{}, None, "text", [], 5, {"api": {}}, {"foo": 1}, {"prompt": None, "stream": True}]
)
def test_an_unknown_shape_is_told_the_known_ones(job_input: Any) -> None:
    with pytest.raises(BadRequest) as error:
        parse(job_input)
    assert error.value.message.startswith(SHAPES) and error.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "job_input", [{"openai_route": "/nope", "openai_input": {"x": 1}}, {"route": "/v2/" + "x" * 9999}]
)
def test_an_unknown_route_is_told_the_known_ones(job_input: Any) -> None:
    with pytest.raises(RouteNotFound) as error:
        parse(job_input)
    assert "/chat/completions" in error.value.message and error.value.status == 404


@pytest.mark.parametrize(
    ("route", "method", "allow"),
    [(CHAT, "GET", "POST"), (CHAT, "put", "POST"), ("/v1/models", "DELETE", "GET"), ("/v1/models/m", "PATCH", "GET")],
)
@pytest.mark.parametrize("rest", [{}, {"body": {"messages": USER}}])
def test_another_method_than_the_routes_own_is_refused(
    route: str, method: str, allow: str, rest: dict[str, Any]
) -> None:
    """A DELETE of a model was answered as a GET, a PUT as a POST."""
    with pytest.raises(MethodNotAllowed) as error:
        parse({"route": route, "method": method, **rest})
    assert error.value.allow == allow and error.value.param == "method"


# --- the shape of older workers


def test_a_prompt_or_messages_with_sampling_params_make_one_body() -> None:
    operation = parse({"prompt": "Hi", "sampling_params": {"max_tokens": 5, "temperature": None}, "stream": True})
    assert operation == Operation("completions", {"prompt": "Hi", "stream": True, "max_tokens": 5})
    assert parse({"messages": USER, "sampling_params": {"top_k": 3}}) == Operation(
        "chat", {"messages": USER, "top_k": 3}
    )
    assert parse({"messages": "hi"}) == Operation("chat", {"messages": "hi"})


@pytest.mark.parametrize("extra", [{"max_tokens": 5}, {"temperature": 1}])
def test_sampling_parameters_beside_the_prompt_are_honoured(extra: dict[str, Any]) -> None:
    body = parse({"prompt": "Hi", **extra}).body
    request = CompletionRequest.parse(body)
    assert {name: getattr(request, name) for name in extra} == extra


def test_sampling_params_win_over_the_same_field_beside_them() -> None:
    assert parse({"prompt": "Hi", "max_tokens": 5, "sampling_params": {"max_tokens": 6}}).body["max_tokens"] == 6


def test_a_stream_given_as_text_is_refused_later_and_never_true() -> None:
    operation = parse({"prompt": "Hi", "stream": "false"})
    assert not operation.stream
    with pytest.raises(BadRequest, match="stream must be a boolean"):
        CompletionRequest.parse(operation.body)


def test_messages_win_over_a_prompt() -> None:
    assert parse({"messages": USER, "prompt": "x"}) == Operation("chat", {"messages": USER})


@pytest.mark.parametrize(
    ("job_input", "messages"),
    [
        ({"prompt": "Hi", "apply_chat_template": True}, "Hi"),
        ({"prompt": USER}, USER),
        ({"prompt": USER, "apply_chat_template": False}, USER),
    ],
)
def test_a_prompt_that_wants_the_template_is_chat(job_input: dict[str, Any], messages: Any) -> None:
    operation = parse(job_input)
    assert operation.kind == "chat" and operation.body["messages"] == messages and "prompt" not in operation.body


def test_logprobs_of_the_old_sampling_parameters_mean_alternatives_in_chat() -> None:
    body = parse({"messages": USER, "sampling_params": {"logprobs": 3}}).body
    assert ChatCompletionRequest.parse(body).num_logprobs == 3
    assert CompletionRequest.parse(parse({"prompt": "a", "sampling_params": {"logprobs": 3}}).body).num_logprobs == 3


def test_guided_decoding_of_the_old_sampling_parameters_is_a_constraint() -> None:
    body = parse({"prompt": "a", "sampling_params": {"guided_decoding": {"choice": ["yes", "no"]}}}).body
    constraint = CompletionRequest.parse(body).constraint
    assert constraint is not None and json.loads(constraint.spec.source) == ["yes", "no"]


@pytest.mark.parametrize("knob", [{"max_batch_size": 30}, {"apply_chat_template": False}, {"use_openai_format": False}])
def test_a_knob_of_the_oldest_workers_asks_for_their_answer(knob: dict[str, Any]) -> None:
    operation = parse({"prompt": "Hi", **knob})
    assert operation.native == Native(max_batch_size=knob.get("max_batch_size"))
    assert operation.body == {"prompt": "Hi", "max_tokens": NATIVE_MAX_TOKENS}


def test_without_a_knob_or_by_their_switch_the_answer_is_openais() -> None:
    assert parse({"prompt": "Hi"}).native is None
    operation = parse({"prompt": "Hi", "max_batch_size": 30, "use_openai_format": True})
    assert operation == Operation("completions", {"prompt": "Hi"})


def test_batch_limits_are_kept() -> None:
    job_input = {"messages": USER, "min_batch_size": 2, "max_batch_size": 8.0, "batch_size_growth_factor": 1.5}
    assert parse({**job_input, "sampling_params": {"max_tokens": 7}}) == Operation(
        "chat", {"messages": USER, "max_tokens": 7}, native=Native(2, 8, 1.5)
    )


shaped = st.fixed_dictionaries(
    {},
    optional={
        "openai_route": st.sampled_from([CHAT, "/v1/completions", "/v1/models", "/x", ""]) | any_json,
        "openai_input": any_json,
        "route": st.sampled_from([CHAT, "/tokenize"]) | any_json,
        "body": any_json,
        "method": st.sampled_from(["GET", "POST"]) | any_json,
        "prompt": any_json,
        "messages": any_json,
        "sampling_params": any_json,
        "apply_chat_template": any_json,
        "max_batch_size": any_json,
        "batch_size_growth_factor": any_json,
    },
)


@settings(deadline=None, max_examples=150)
@given(shaped | any_json)
def test_any_json_is_an_operation_or_an_error_for_the_client(job_input: Any) -> None:
    try:
        operation = parse(job_input)
    except WorkerError as error:
        assert 400 <= error.status < 500 and 0 < len(error.message) <= MAX_MESSAGE_CHARS
        json.dumps(error.body(), allow_nan=False).encode()
    else:
        assert isinstance(operation.body, dict)
