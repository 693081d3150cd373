"""Request bodies: every field's default, range and error; what is refused by name; any JSON ends in a clear answer."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.loop_ticks import ticking
from tests.unit.strategies import any_json
from worker.errors import MAX_MESSAGE_CHARS, BadRequest, WorkerError
from worker.protocol.body import UNSUPPORTED
from worker.protocol.requests import (
    RESERVED_TEMPLATE_KWARGS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from worker.protocol.tools import ToolChoice
from worker.protocol.validation import is_large

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g"}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.parse({"messages": USER, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse({"prompt": "hi", **fields})


def refusal(parse: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        parse(**fields)
    assert error.value.status == 400 and error.value.message and error.value.type == "invalid_request_error"
    return error.value


# --- one field at a time


GOOD: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.0),
    ("temperature", 2, 2.0),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", 0, 0),
    ("top_k", -1, -1),
    ("top_k", 1_000_000, 1_000_000),
    ("top_k", 5.0, 5),
    ("min_p", 0, 0.0),
    ("repetition_penalty", 0.1, 0.1),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("n", 128, 128),
    ("best_of", 3, 3),
    ("seed", 0, 0),
    ("seed", -1, -1),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("stop", "x", ("x",)),
    ("stop", [], ()),
    ("stop", ["a", "b", "c", "d"], ("a", "b", "c", "d")),
    ("stop_token_ids", [1, 2.0], (1, 2)),
    ("logit_bias", {"5": 100, "6": -1}, ((5, 100.0), (6, -1.0))),
    ("bad_words", ["a"], ("a",)),
    ("early_stopping", "never", "never"),
    ("length_penalty", -1.5, -1.5),
    ("truncate_prompt_tokens", -1, -1),
    ("cache_salt", "tenant-1", "tenant-1"),
    ("priority", -7, -7),
    ("metadata", {"a": "b"}, {"a": "b"}),
    ("request_id", "abc-123", "abc-123"),
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_values_in_range(parse: Any, name: str, value: Any, expected: Any) -> None:
    assert getattr(parse(**{name: value}), name) == expected


BAD: list[tuple[str, Any, str]] = [
    ("temperature", "hot", "invalid_type"),
    ("temperature", "1", "invalid_type"),
    ("temperature", True, "invalid_type"),
    ("temperature", 2.01, "decimal_above_max_value"),
    ("temperature", -0.1, "decimal_below_min_value"),
    ("temperature", float("nan"), "invalid_value"),
    ("temperature", float("inf"), "invalid_value"),
    ("top_p", 0, "decimal_below_min_value"),
    ("top_p", 1.1, "decimal_above_max_value"),
    ("top_k", -2, "integer_below_min_value"),
    ("top_k", 1.5, "invalid_type"),
    ("min_p", 1.1, "decimal_above_max_value"),
    ("repetition_penalty", 0, "decimal_below_min_value"),
    ("presence_penalty", 2.1, "decimal_above_max_value"),
    ("frequency_penalty", -2.1, "decimal_below_min_value"),
    ("n", 0, "integer_below_min_value"),
    ("n", 129, "integer_above_max_value"),
    ("n", True, "invalid_type"),
    ("n", "2", "invalid_type"),
    ("best_of", -1, "integer_below_min_value"),
    ("seed", 2**64, "invalid_value"),
    ("seed", 2**63, "integer_above_max_value"),
    ("stop", "", "empty_string"),
    ("stop", ["a", ""], "empty_string"),
    ("stop", ["a"] * 5, "array_above_max_length"),
    ("stop", "x" * 1025, "string_above_max_length"),
    ("stop", [1], "invalid_type"),
    ("stop", 5, "invalid_type"),
    ("stop_token_ids", [-1], "integer_below_min_value"),
    ("stop_token_ids", ["1"], "invalid_type"),
    ("stop_token_ids", list(range(2000)), "array_above_max_length"),
    ("allowed_token_ids", [], "empty_array"),
    ("bad_words", [""], "empty_string"),
    ("bad_words", ["a"] * 129, "array_above_max_length"),
    ("logit_bias", [], "invalid_type"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "array_above_max_length"),
    ("min_tokens", -1, "integer_below_min_value"),
    ("max_tokens", -1, "integer_below_min_value"),
    ("max_tokens", 1.5, "invalid_type"),
    ("ignore_eos", "false", "invalid_type"),
    ("stream", "false", "invalid_type"),
    ("stream", 1, "invalid_type"),
    ("echo", 0, "invalid_type"),
    ("early_stopping", "always", "invalid_type"),
    ("length_penalty", 11, "decimal_above_max_value"),
    ("truncate_prompt_tokens", 0, "integer_below_min_value"),
    ("truncate_prompt_tokens", -2, "integer_below_min_value"),
    ("truncation_side", "middle", "invalid_value"),
    ("prompt_logprobs", -2, "integer_below_min_value"),
    ("cache_salt", "a/b", "invalid_value"),
    ("cache_salt", "a\0b", "invalid_value"),
    ("cache_salt", "", "empty_string"),
    ("cache_salt", "x" * 129, "string_above_max_length"),
    ("priority", 2**63, "integer_above_max_value"),
    ("priority", "high", "invalid_type"),
    ("request_id", "a\nb", "invalid_value"),
    ("request_id", "é", "invalid_value"),
    ("stream_interval", 0, "integer_below_min_value"),
    ("model", 5, "invalid_type"),
    ("user", 5, "invalid_type"),
    ("metadata", {str(i): "" for i in range(17)}, "object_above_max_properties"),
    ("metadata", {"a": "x" * 513}, "invalid_value"),
    ("metadata", {"a": 1}, "invalid_value"),
    ("response_format", "json", "invalid_type"),
    ("structured_outputs", [], "invalid_type"),
]


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(("name", "value", "code"), BAD)
def test_values_out_of_range_name_the_field(parse: Any, name: str, value: Any, code: str) -> None:
    error = refusal(parse, **{name: value})
    assert (error.param, error.code) == (name, code)
    assert error.message.startswith(name) and len(error.message) < 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"²": 1}}, "logit_bias.²"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias.1"),
        ({"logit_bias": {"1": -101}}, "logit_bias.1"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_parts_and_combinations_name_the_field(parse: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal(parse, **fields).param == param


def test_several_errors_are_told_at_once_and_at_most_ten() -> None:
    error = refusal(chat, temperature=3, top_p=2, n=0)
    assert error.param == "n" and "temperature must be" in error.message and "top_p must be" in error.message
    flags = ["stream", "echo", "ignore_eos", "logprobs", "store", "use_beam_search", "skip_special_tokens",
             "return_token_ids", "include_reasoning", "parallel_tool_calls", "add_special_tokens",
             "return_prompt_text"]  # fmt: skip
    assert "and 2 more" in refusal(chat, **dict.fromkeys(flags, "x")).message


@pytest.mark.parametrize("parse", [chat, completion])
def test_what_is_quoted_is_quoted_as_it_came(parse: Any) -> None:
    assert refusal(parse, truncation_side="{x} %s }").message.endswith('got "{x} %s }"')


@pytest.mark.parametrize("parse", [chat, completion])
def test_null_is_the_same_as_absent(parse: Any) -> None:
    names = [
        "temperature", "top_p", "max_tokens", "n", "stop", "seed", "logit_bias", "tools", "tool_choice",
        "response_format", "stream", "user", "stream_options", "logprobs", "best_of", "metadata",
    ]  # fmt: skip
    assert parse(**dict.fromkeys(names)) == parse()


def test_the_fields_of_openais_hosted_service_change_nothing() -> None:
    extras = {
        "user": "u1", "store": False, "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True, "seed": 1,
        "logprobs": False, "functions": None, "function_call": None, "prediction": None, "modalities": ["text"],
        "safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "low",
    }  # fmt: skip
    request = chat(**extras)
    assert request.seed == 1 and request.ignored_fields() == [] and request.choice_of_tools.kind == "none"
    assert chat(prediction={"type": "content", "content": "x"}).ignored_fields() == []


def test_unknown_fields_are_accepted_and_reported_in_bounds() -> None:
    request = chat(foo=1, bar=None, **{"x" * 500: 1})
    assert request.ignored_fields() == ["foo", "x" * 64]
    assert len(chat(**{f"a{i}": 1 for i in range(100)}).ignored_fields()) == 20


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_known_and_impossible_is_refused_by_name(name: str) -> None:
    harmless, _ = UNSUPPORTED[name]
    for parse in (chat, completion):
        error = refusal(parse, **{name: {"x": 1}})
        assert (error.param, error.code) == (name, "unsupported_parameter") and error.message.startswith(name)
        for value in (None, *harmless):
            assert parse(**{name: value}).ignored_fields() == []


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (chat, {"prompt": "x"}),
        (chat, {"suffix": "x"}),
        (completion, {"messages": USER}),
        (completion, {"tools": [TOOL]}),
        (completion, {"max_completion_tokens": 5}),
        (completion, {"top_logprobs": 5}),
        (completion, {"tool_choice": "required"}),
    ],
)
def test_a_field_of_the_other_route_is_refused_by_name(parse: Any, fields: dict[str, Any]) -> None:
    error = refusal(parse, **fields)
    assert error.param == next(iter(fields)) and "/v1/" in error.message


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(BadRequest) as error:
        ChatCompletionRequest.parse(body)
    assert error.value.param == "body"


def test_defaults_of_chat_and_completions() -> None:
    assert chat().max_output_tokens is None and completion().max_output_tokens == 16
    assert completion(max_tokens=None).max_output_tokens == 16
    assert chat(max_tokens=50, max_completion_tokens=3).max_output_tokens == 3
    assert chat(max_tokens=50).max_output_tokens == 50
    assert (chat().add_special_tokens, completion().add_special_tokens) == (False, True)
    assert (chat().temperature, chat().n, chat().skip_special_tokens, chat().include_reasoning) == (None, 1, True, True)


def test_max_tokens_zero_only_scores_a_prompt() -> None:
    assert refusal(chat, max_tokens=0).param == "max_tokens"
    assert refusal(completion, max_tokens=0).param == "max_tokens"
    assert completion(max_tokens=0, echo=True, logprobs=1).max_tokens == 0


def test_logprobs_of_chat_and_completions() -> None:
    assert chat().num_logprobs is None and chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).num_logprobs == 5
    assert chat(top_logprobs=0).num_logprobs is None
    assert refusal(chat, top_logprobs=5).param == "top_logprobs"
    assert refusal(chat, logprobs=5).param == "logprobs"
    assert completion(logprobs=0).num_logprobs == 0 and completion().num_logprobs is None
    assert refusal(completion, logprobs=True).param == "logprobs"


# --- messages


def test_one_string_is_one_user_message() -> None:
    assert ChatCompletionRequest.parse({"messages": "hi"}).messages == USER


@pytest.mark.parametrize("body", [{"messages": []}, {}, {"messages": None}, {"messages": ""}, {"messages": 5}])
def test_messages_are_required(body: dict[str, Any]) -> None:
    assert refusal(lambda: ChatCompletionRequest.parse(body)).param == "messages"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[1].role"),
        ("hi", "messages[1]"),
        ({"role": "narrator", "content": "x"}, "messages[1].role"),
        ({"role": None, "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "tool", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [5]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "nope", "x": 1}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": "x", "name": 5}, "messages[1].name"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "assistant", "audio": {"id": "a"}, "content": "x"}, "messages[1].audio"),
        ({"role": "assistant", "tool_calls": {}, "content": 5}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[1].name"),
    ],
)
def test_a_bad_message_is_named_with_its_index_and_field(message: Any, param: str) -> None:
    error = refusal(chat, messages=[USER[0], message])
    assert error.param == param and error.message.startswith(param)


def test_a_bare_string_is_a_part_of_text() -> None:
    message = chat(messages=[{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]).messages[0]
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "input_image", "image_url": "http://127.0.0.1:9/x"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "input_file", "file_url": "http://127.0.0.1:9/x"},
    ],
)
def test_image_audio_video_and_file_parts_are_refused_by_name(part: dict[str, Any]) -> None:
    error = refusal(chat, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert error.param == "messages[0].content[1]" and str(part["type"]) in error.message


def test_an_answer_can_be_sent_back_with_all_its_null_fields() -> None:
    answer = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "reasoning_content": "r",
        "tool_calls": [{"id": "call_a", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}],
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_a", "content": "done"}
    messages = chat(messages=[*USER, answer, result], tools=[TOOL]).messages
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": None,
            "annotations": [],
            "reasoning_content": "r",
            "tool_calls": [{"id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        result,
    ]


@pytest.mark.parametrize("empty", [[], None])
def test_an_empty_list_of_calls_is_no_calls(empty: Any) -> None:
    assert chat(messages=[{"role": "assistant", "content": "x", "tool_calls": empty}]).messages == [
        {"role": "assistant", "content": "x"}
    ]


def test_fields_that_only_a_template_knows_pass_through() -> None:
    messages = [{"role": "user", "name": "ann", "content": "q", "mood": 1}]
    assert chat(messages=messages).messages == messages


def test_text_parts_stay_parts_and_nothing_is_changed_in_place() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]
    before = json.dumps(messages)
    assert chat(messages=messages).messages[0]["content"] == [{"type": "text", "text": "Hi"}]
    assert json.dumps(messages) == before


def test_malformed_arguments_in_the_history_are_kept_as_text() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    messages = chat(messages=[*USER, {"role": "assistant", "tool_calls": [call]}]).messages
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == "{"


def test_legacy_function_turns_become_tool_turns() -> None:
    messages = chat(
        messages=[
            *USER,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "12"},
            {"role": "function", "name": "other", "content": None},
        ]
    ).messages
    assert messages[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert messages[2] == {"role": "tool", "name": "f", "content": "12", "tool_call_id": "call_1"}
    assert messages[3] == {"role": "tool", "name": "other", "content": ""}


def test_ten_thousand_messages_are_read_and_more_are_refused() -> None:
    assert len(chat(messages=USER * 10_000).messages) == 10_000
    assert refusal(chat, messages=USER * 10_001).code == "array_above_max_length"


@pytest.mark.parametrize(
    ("parse", "name", "value"),
    [
        (ChatCompletionRequest.parse, "messages", USER * 400_000),
        (TokenizeRequest.parse, "messages", [None] * 10_001),
        (CompletionRequest.parse, "prompt", [7] * 2_000_001),
        (DetokenizeRequest.parse, "tokens", [7] * 250_001),
    ],
)
def test_an_array_that_is_far_too_long_is_refused_before_it_is_looked_at(parse: Any, name: str, value: Any) -> None:
    start = time.process_time()
    error = refusal(parse, body={name: value})
    assert time.process_time() - start < 0.05
    assert error.param == name and "at most" in error.message and str(len(value)) in error.message


async def test_a_body_that_takes_long_to_check_is_checked_beside_the_loop() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}] * 5}] * 9_000
    async with ticking() as ticks:
        assert len((await ChatCompletionRequest.parse_async({"messages": messages})).messages) == 9_000
    assert ticks.count > 5


@pytest.mark.parametrize(
    ("body", "large"),
    [
        ({"messages": USER * 20}, False),
        ({"messages": USER * 1500}, True),
        ({"prompt": [5] * 40_000}, False),
        ({"prompt": [5] * 60_000}, True),
        ({"messages": "x" * 1_000_001}, True),
        ({"tools": [{"a": {"b": {str(i): i for i in range(3000)}}}]}, True),
        (None, False),
    ],
)
def test_what_is_large(body: Any, large: bool) -> None:
    assert is_large(body) == large


# --- prompts


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([19556], ((19556,),)),
        ([[19556], [905]], ((19556,), (905,))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_shapes_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (None, "prompt"),
        ([None], "prompt[0]"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1, True]], "prompt[0][1]"),
        ([-1], "prompt"),
        (["a"] * 1025, "prompt"),
    ],
)
def test_a_bad_prompt_is_named(prompt: Any, param: str) -> None:
    assert refusal(completion, prompt=prompt).param == param


def test_prompts_times_answers_are_bounded() -> None:
    assert completion(prompt=["a"] * 8, n=128).n == 128
    assert refusal(completion, prompt=["a"] * 9, n=128).param == "prompt"
    assert refusal(completion, prompt=["a"] * 9, best_of=128).param == "prompt"


def test_echo_and_suffix_exclude_each_other() -> None:
    assert refusal(completion, echo=True, suffix="x").param == "suffix"


# --- templates


def test_a_template_in_the_request_needs_the_servers_trust() -> None:
    request = chat(chat_template="X")
    with pytest.raises(BadRequest) as error:
        request.check_template(trusted=False)
    assert error.value.param == "chat_template"
    request.check_template(trusted=True)
    chat().check_template(trusted=False)


@pytest.mark.parametrize("name", sorted(RESERVED_TEMPLATE_KWARGS))
@pytest.mark.parametrize("value", [None, "X", True])
def test_the_renderers_own_names_cannot_be_given(name: str, value: Any) -> None:
    assert refusal(chat, chat_template_kwargs={name: value}).param == f"chat_template_kwargs.{name}"


def test_other_template_variables_are_kept() -> None:
    kwargs = {"enable_thinking": False, "custom": "ok"}
    assert chat(chat_template_kwargs=kwargs).chat_template_kwargs == kwargs
    assert refusal(chat, chat_template_kwargs=[]).param == "chat_template_kwargs"


def test_continuing_a_message_does_not_open_another() -> None:
    assert chat().add_generation_prompt is True
    assert chat(continue_final_message=True).add_generation_prompt is False
    assert refusal(chat, continue_final_message=True, add_generation_prompt=True).param == "continue_final_message"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_reasoning_effort(effort: str) -> None:
    assert chat(reasoning_effort=effort).reasoning_effort == effort
    assert refusal(chat, reasoning_effort=effort.upper()).param == "reasoning_effort"


# --- tools


def test_tools_in_normal_form() -> None:
    request = chat(tools=[TOOL, OTHER_TOOL])
    assert [tool.name for tool in request.all_tools] == ["f", "g"]
    assert request.all_tools[0].parameters == {"type": "object"} and request.all_tools[0].source == TOOL
    assert request.choice_of_tools == ToolChoice("auto") and not request.legacy_functions


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice("none")),
        ("auto", ToolChoice("auto")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "g"}}, ToolChoice("named", "g")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER_TOOL]}},
            ToolChoice("required", allowed=("g",)),
        ),
    ],
)
def test_choices_of_tools(choice: Any, expected: ToolChoice) -> None:
    assert chat(tools=[TOOL, OTHER_TOOL], tool_choice=choice).choice_of_tools == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * 513}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [TOOL]}},
            },
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"functions": []}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ],
)
def test_bad_tools_are_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).param == param


def test_legacy_functions_are_tools() -> None:
    request = chat(functions=[{"name": "f", "parameters": {}}], function_call={"name": "f"})
    assert request.legacy_functions and request.choice_of_tools == ToolChoice("named", "f")
    assert request.all_tools[0].source == {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert chat(functions=[{"name": "f"}]).choice_of_tools == ToolChoice("auto")


# --- constraints


SCHEMA = {"type": "object", "properties": {"thoughts": {}, "answer": {}}}


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
            "response_format",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["é", "no"]}}, "choice", ["é", "no"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: x"}}, "lark", "start: x", "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": "start: x"}, "lark", "start: x", "guided_grammar"),
    ],
)
@pytest.mark.parametrize("parse", [chat, completion])
def test_constraints_in_normal_form(parse: Any, fields: dict[str, Any], kind: str, source: Any, param: str) -> None:
    constraint = parse(**fields).constraint
    assert (constraint.spec.kind, constraint.param) == (kind, param)
    got = json.loads(constraint.spec.source) if kind in ("json_schema", "choice") else constraint.spec.source
    assert got == source
    if kind == "json_schema":
        assert list(got["properties"]) == ["thoughts", "answer"], "the order of properties is the author's"


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json_object": False}])
def test_no_constraint(fields: dict[str, Any]) -> None:
    assert chat(**fields).constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 3000}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
    ],
)
def test_bad_constraints_are_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).param == param


# --- what no field can mean


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"properties": value}
    return value


@pytest.mark.parametrize(
    "fields",
    [
        lambda value: {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}},
        lambda value: {"tools": [{"type": "function", "function": {"name": "f", "parameters": value}}]},
        lambda value: {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}]
        },
        lambda value: {"metadata_": value},
        lambda value: {"guided_json": json.dumps(value)},
    ],
)
def test_nesting_of_a_hundred_works_and_of_three_thousand_is_refused(fields: Any) -> None:
    chat(**fields(nested(100)))
    try:
        deep = fields(nested(3000))
    except RecursionError:  # the text of a schema that Python's own writer gives up on
        deep = {"guided_json": '{"a":' * 3000 + "{}" + "}" * 3000}
    assert refusal(chat, **deep).code in ("invalid_value", "invalid_json_schema")


@pytest.mark.parametrize("place", ["content", "key", "ignored"])
def test_half_of_a_surrogate_pair_is_refused_by_name(place: str) -> None:
    fields = {
        "content": {"messages": [{"role": "user", "content": "a\ud83d"}]},
        "key": {"x": {"\ud83d": 1}},
        "ignored": {"x": ["\udd8a"]},
    }[place]
    error = refusal(chat, **fields)
    assert "surrogate" in error.message
    assert error.param == {"content": "messages[0].content", "key": "x", "ignored": "x[0]"}[place]
    json.dumps(error.body()).encode()


def test_nul_and_other_control_characters_are_text() -> None:
    assert chat(messages="a\0b\x1b").messages[0]["content"] == "a\0b\x1b"


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), 2**64, {5: 1}, b"x", {1, 2}, object(), (1,)],
    ids=["huge", "-huge", "65 bits", "key", "bytes", "set", "object", "tuple"],
)
def test_values_that_json_cannot_carry_are_refused(value: Any) -> None:
    error = refusal(chat, x=value, n=1)
    assert error.param == "x"


@pytest.mark.parametrize(
    "fields",
    [
        lambda text: {"x": [{}] * 600_000},
        lambda text: {"x": [[[]] * 10] * 60_000},
        lambda text: {"stop": text},
        lambda text: {"temperature": text},
        lambda text: {text: "\ud83d"},
        lambda text: {"model": text},
        lambda text: {"tool_choice": text},
        lambda text: {"messages": [{"role": text}]},
    ],
    ids=["objects", "arrays", "stop", "type", "key", "model", "tool_choice", "role"],
)
def test_twenty_megabytes_get_a_short_answer_soon(fields: Any) -> None:
    body = fields("x" * 20_000_000)
    start = time.process_time()
    error = refusal(chat, **body)
    assert time.process_time() - start < 2
    assert len(json.dumps(error.body())) < 2500


def test_twenty_megabytes_of_text_and_of_token_ids_are_read_soon() -> None:
    start = time.process_time()
    chat(messages="é" * 10_000_000)
    completion(prompt=[12345] * 2_000_000)
    assert time.process_time() - start < 3


# --- the small ones


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert TokenizeRequest.parse({"prompt": ""}).prompt == ""
    assert TokenizeRequest.parse({"messages": "hi", "tools": [TOOL]}).messages == USER
    for body in ({}, {"prompt": "a", "messages": USER}, {"prompt": 5}):
        assert refusal(TokenizeRequest.parse, body=body).param == "prompt"


def test_detokenize_takes_token_ids() -> None:
    assert DetokenizeRequest.parse({"tokens": [1, 2]}).tokens == (1, 2)
    assert DetokenizeRequest.parse({"tokens": []}).tokens == ()
    for tokens in (None, ["a"], [1.5], [-1], "x", 5):
        assert str(refusal(DetokenizeRequest.parse, body={"tokens": tokens}).param).startswith("tokens")


# --- anything


FIELDS = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED, "x"})
bodies = st.dictionaries(st.sampled_from(FIELDS), any_json, max_size=4)


@settings(deadline=None, max_examples=200)
@given(bodies, st.booleans(), st.booleans())
@example({"tools": [{"function": {"name": "f", "parameters": {"minimum": -(2**63) - 1}}}]}, False, True)
@example({"guided_json": {"minimum": -(2**63) - 1}}, False, True)
@example({"x": [-(2**63) - 1]}, False, True)
@example({"stop": "{x}", "temperature": "{x}"}, True, True)
def test_any_json_is_a_request_or_a_bounded_400(body: dict[str, Any], as_completion: bool, with_prompt: bool) -> None:
    model = CompletionRequest if as_completion else ChatCompletionRequest
    if with_prompt:
        body = {**({"prompt": "hi"} if as_completion else {"messages": USER}), **body}
    try:
        request = model.parse(body)
    except WorkerError as error:
        assert error.status == 400 and 0 < len(error.message) <= MAX_MESSAGE_CHARS and error.param
        json.dumps(error.body(), allow_nan=False).encode()
    else:
        assert request.ignored_fields() == [name for name in request.ignored_fields() if name in body]


@settings(deadline=None, max_examples=150)
@given(st.lists(any_json | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "function_call", "name"]),
       st.sampled_from(["user", "assistant", "function", "tool"]) | any_json, max_size=4), max_size=3))  # fmt: skip
def test_any_messages_are_normal_or_named(messages: list[Any]) -> None:
    try:
        normal = chat(messages=messages).messages
    except WorkerError as error:
        assert error.status == 400 and str(error.param).startswith("messages")
    else:
        assert chat(messages=normal).messages == normal, "the normal form is its own normal form"
