"""Answers and chunks have OpenAI's shapes: the SDK's own strict types read them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from worker.protocol import responses, sse
from worker.protocol.chunks import (
    Chunks,
    content_delta,
    delta_choice,
    function_call_delta,
    reasoning_delta,
    role_delta,
    tool_arguments_delta,
    tool_call_delta,
)
from worker.protocol.responses import Head, Usage

HEAD = Head("chatcmpl-1", 1_700_000_000, "m", "fp_1")
USAGE = Usage(prompt_tokens=31, completion_tokens=15, cached_tokens=16, reasoning_tokens=4)


def read(of: Any, body: dict[str, Any]) -> Any:
    """`body` through the wire and into the SDK's type, with no conversion of values."""
    return TypeAdapter(of).validate_json(json.dumps(json.loads(sse.dumps(body)), allow_nan=False), strict=True)


def test_usage_is_complete_and_adds_up() -> None:
    assert USAGE.body() == {
        "prompt_tokens": 31,
        "completion_tokens": 15,
        "total_tokens": 46,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    assert USAGE + Usage(1, 2, 3, 4) == Usage(32, 17, 19, 8)


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (responses.chat_message("text"), "text"),
        (responses.chat_message(""), ""),
        (responses.chat_message(None, tool_calls=[responses.tool_call("call_1", "f", "{}")]), None),
        (responses.chat_message(None, function_call={"name": "f", "arguments": "{}"}), None),
        (responses.chat_message("a", reasoning="r"), "a"),
    ],
)
def test_a_chat_completion(message: dict[str, Any], content: str | None) -> None:
    entry = responses.token_logprob("a", -math.inf, b"\xf0\x9f", [("b", -0.5, b"b"), ("c", math.nan, b"c")])
    choice = responses.chat_choice(0, message, "stop", logprobs=[entry], stop_reason=2)
    answer = read(ChatCompletion, responses.chat_completion(HEAD, [choice], USAGE))
    assert answer.object == "chat.completion" and answer.usage.total_tokens == 46
    got = answer.choices[0]
    assert got.message.content == content and got.message.role == "assistant" and got.stop_reason == 2
    first = got.logprobs.content[0]
    assert first.logprob == -9999.0 and first.bytes == [240, 159]
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -9999.0]


def test_reasoning_has_both_names() -> None:
    message = responses.chat_message("a", reasoning="r")
    assert message["reasoning"] == message["reasoning_content"] == "r"
    assert "reasoning" not in responses.chat_message("a") and reasoning_delta("r") == {
        "reasoning": "r",
        "reasoning_content": "r",
    }


def test_a_completion() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    choices = [responses.completion_choice(index, "a", "length") for index in range(2)]
    body = responses.completion(HEAD, [*choices, responses.completion_choice(2, "a", "stop", stop_reason="x")], USAGE)
    answer = read(Completion, body)
    assert answer.object == "text_completion" and [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[2].stop_reason == "x" and answer.choices[0].stop_reason is None
    assert responses.completion_choice(0, "a", None, logprobs=logprobs)["logprobs"] == logprobs


def test_fields_that_were_not_asked_for_are_absent() -> None:
    body = responses.chat_completion(HEAD, [], USAGE, prompt_token_ids=None, prompt_text="p")
    assert "prompt_token_ids" not in body and body["prompt_text"] == "p"
    assert "token_ids" not in responses.completion_choice(0, "", None, token_ids=None)


def test_ids_carry_the_requests_id_or_are_new() -> None:
    assert Head.chat("m", "r1").id == "chatcmpl-r1" and Head.completion("m", "r1").id == "cmpl-r1"
    assert Head.chat("m").id != Head.chat("m").id and isinstance(Head.chat("m").created, int)


def chunks_of(deltas: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    builder = Chunks(HEAD, **options)
    return [builder.chunk(delta_choice(0, delta)) for delta in deltas]


def test_every_chat_chunk_is_the_sdks() -> None:
    deltas = [
        role_delta(),
        content_delta("a"),
        reasoning_delta("r"),
        tool_call_delta(0, "call_1", "f"),
        tool_arguments_delta(0, '{"a":'),
        function_call_delta("f"),
        function_call_delta(fragment="{}"),
        {},
    ]
    read_back = [read(ChatCompletionChunk, chunk) for chunk in chunks_of(deltas)]
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in read_back} == {
        ("chatcmpl-1", 1_700_000_000, "m", "chat.completion.chunk")
    }
    assert [chunk.choices[0].delta.role for chunk in read_back] == ["assistant"] + [None] * 7
    assert all(chunk.choices[0].finish_reason is None for chunk in read_back)
    call = read_back[3].choices[0].delta.tool_calls[0]
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "f", "")
    later = read_back[4].choices[0].delta.tool_calls[0]
    assert (later.id, later.function.name, later.function.arguments) == (None, None, '{"a":')


def test_the_finishing_chunk() -> None:
    chunk = Chunks(HEAD).chunk(delta_choice(1, {}, "stop", stop_reason="END", token_ids=[2]))
    choice = read(ChatCompletionChunk, chunk).choices[0]
    assert (choice.index, choice.finish_reason, choice.stop_reason, choice.token_ids) == (1, "stop", "END", [2])
    assert "stop_reason" not in chunks_of([content_delta("a")])[0]["choices"][0]


def test_usage_stands_where_it_was_asked_for() -> None:
    assert "usage" not in chunks_of([content_delta("a")])[0]
    assert chunks_of([content_delta("a")], include_usage=True)[0]["usage"] is None
    builder = Chunks(HEAD, include_usage=True)
    assert builder.chunk(delta_choice(0, {}), usage=USAGE)["usage"]["completion_tokens"] == 15
    last = read(ChatCompletionChunk, builder.usage(USAGE))
    assert last.choices == [] and last.usage.total_tokens == 46


def test_a_completion_chunk_has_no_role() -> None:
    chunk = Chunks(HEAD, "text_completion").chunk(responses.completion_choice(0, "a", None))
    assert chunk["object"] == "text_completion" and "delta" not in chunk["choices"][0]
    assert chunk["choices"][0]["finish_reason"] is None


def test_models() -> None:
    card = responses.model_card("m", created=1, root="org/m", max_model_len=8192)
    body = responses.model_list([card])
    model = read(Model, body["data"][0])
    assert (body["object"], model.id, model.object, model.max_model_len) == ("list", "m", "model", 8192)
