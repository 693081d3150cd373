"""From a request to the engine's sampling parameters: precedence, the context, greedy, stop ids, the vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.messages import SamplingParams
from worker.errors import BadRequest, ContextLength, SettingsError
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest
from worker.sampling import Defaults, Model, defaults, sampling_params, truncated
from worker.settings import Settings

MODEL = Model(max_model_len=64, vocab_size=1000, stop_ids=frozenset({2, 0}))
NOTHING_SAID = Defaults()


def server(generation_config: dict[str, Any] | None = None, **environ: str) -> Defaults:
    return defaults(Settings.from_env(environ, has_gpu=False), generation_config or {})


def chat(
    num_prompt_tokens: int = 10, given: Defaults = NOTHING_SAID, model: Model = MODEL, **fields: Any
) -> SamplingParams:
    request = ChatCompletionRequest.parse({"messages": "hi", **fields})
    return sampling_params(request, model, given, num_prompt_tokens=num_prompt_tokens)


def completion(
    num_prompt_tokens: int = 10, given: Defaults = NOTHING_SAID, model: Model = MODEL, **fields: Any
) -> SamplingParams:
    request = CompletionRequest.parse({"prompt": "hi", **fields})
    return sampling_params(request, model, given, num_prompt_tokens=num_prompt_tokens)


GENERATION_CONFIG = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [1], "do_sample": True}
OWN = {"temperature": 1, "top_k": 0, "repetition_penalty": 1.0}


def drawn(params: SamplingParams) -> tuple[float, int, float]:
    return params.temperature, params.top_k, params.repetition_penalty


def test_the_models_generation_config_gives_the_defaults_and_a_request_overrides_them() -> None:
    auto, none = server(GENERATION_CONFIG), server(GENERATION_CONFIG, GENERATION_CONFIG="none")
    assert drawn(chat(given=auto)) == drawn(completion(given=auto)) == (0.6, 20, 1.1)
    assert drawn(chat(given=none)) == (1.0, 0, 1.0)
    assert drawn(chat(given=auto, **OWN)) == drawn(chat(given=none, **OWN)) == (1.0, 0, 1.0)


def test_the_operators_settings_win_over_the_model() -> None:
    given = server(
        GENERATION_CONFIG, DEFAULT_TEMPERATURE="0.9", OVERRIDE_GENERATION_CONFIG='{"top_k": 5, "top_p": null}'
    )
    assert drawn(chat(given=given)) == (0.9, 5, 1.1)
    assert chat(given=server(DEFAULT_TEMPERATURE="0")).temperature == 0.0
    assert drawn(chat(given=given, temperature=0.3, top_k=7)) == (0.3, 7, 1.1)


@pytest.mark.parametrize("name", ["temprature", "do_sample", "eos_token_id"])
def test_an_override_that_would_do_nothing_ends_the_start(name: str) -> None:
    with pytest.raises(SettingsError, match=f"OVERRIDE_GENERATION_CONFIG: '{name}' is not one of temperature, top_p"):
        server(OVERRIDE_GENERATION_CONFIG=f'{{"{name}": 1}}')


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", 1.5), ("repetition_penalty", True),
     ("max_new_tokens", 0), ("min_p", float("nan"))],
)  # fmt: skip
def test_a_default_that_no_request_could_hold_ends_the_start(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"generation_config.json: {name}"):
        server({name: value})


def test_penalties_keep_the_apis_default() -> None:
    params = chat(given=server({"presence_penalty": 1.5, "frequency_penalty": 1.5}))
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)


# --- how long


def test_chat_takes_the_rest_of_the_context_and_completions_sixteen() -> None:
    assert chat(31).max_tokens == 33
    assert completion(31).max_tokens == 16


@pytest.mark.parametrize("run", [chat, completion])
@pytest.mark.parametrize(("num_prompt_tokens", "expected"), [(62, 2), (63, 1)])
def test_an_answer_ends_where_the_context_ends(run: Any, num_prompt_tokens: int, expected: int) -> None:
    assert run(num_prompt_tokens).max_tokens == expected
    assert run(num_prompt_tokens, max_tokens=250_000_000).max_tokens == expected


@pytest.mark.parametrize("num_prompt_tokens", [64, 65, 10_000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(num_prompt_tokens: int) -> None:
    for run, param in ((chat, "messages"), (completion, "prompt")):
        with pytest.raises(ContextLength) as error:
            run(num_prompt_tokens, max_tokens=1)
        assert (error.value.code, error.value.param, error.value.status) == ("context_length_exceeded", param, 400)
        assert "64" in error.value.message and str(num_prompt_tokens) in error.value.message


def test_a_full_context_can_still_be_scored() -> None:
    assert completion(64, echo=True, logprobs=1, max_tokens=0).max_tokens == 0
    with pytest.raises(ContextLength):
        completion(65, echo=True, logprobs=1, max_tokens=0)


def test_a_prompt_without_tokens_is_refused() -> None:
    for run, param in ((chat, "messages"), (completion, "prompt")):
        with pytest.raises(BadRequest) as error:
            run(0)
        assert error.value.param == param


def test_max_completion_tokens_wins() -> None:
    assert chat(max_completion_tokens=3).max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=50).max_tokens == 3


def test_the_models_and_the_operators_length() -> None:
    assert chat(given=server({"max_new_tokens": 20})).max_tokens == 20
    assert chat(given=server({"max_new_tokens": 20}), max_tokens=30).max_tokens == 30
    assert completion(given=server({"max_new_tokens": 20})).max_tokens == 16
    limited = server({"max_new_tokens": 20}, OVERRIDE_GENERATION_CONFIG='{"max_new_tokens": 10}')
    assert (chat(given=limited).max_tokens, chat(given=limited, max_tokens=30).max_tokens) == (10, 10)
    assert completion(given=limited).max_tokens == 10


def test_min_tokens_must_fit() -> None:
    assert chat(min_tokens=5, max_tokens=5).min_tokens == 5
    for fields in ({"min_tokens": 6, "max_tokens": 5}, {"min_tokens": 55}):
        with pytest.raises(BadRequest) as error:
            chat(**fields)
        assert error.value.param == "min_tokens"


# --- how drawn


@pytest.mark.parametrize("temperature", [0, 1e-10, 9e-6])
def test_greedy_switches_the_filters_off(temperature: float) -> None:
    params = chat(temperature=temperature, top_p=0.5, top_k=3, min_p=0.5, seed=7)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_a_small_temperature_is_not_greedy() -> None:
    assert chat(temperature=0.001, top_k=3).top_k == 3


@pytest.mark.parametrize("top_k", [0, -1, None, 1000, 1_000_000])
def test_every_way_to_say_no_top_k(top_k: int | None) -> None:
    assert chat(top_k=top_k) == chat()
    assert chat(given=server({"top_k": 0})) == chat()


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_every_seed_is_a_seed(seed: int) -> None:
    assert chat(seed=seed).seed == seed
    assert chat().seed is None


def test_parameters_pass_through() -> None:
    fields = {
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "min_p": 0.2,
        "logit_bias": {"5": 3},
        "allowed_token_ids": [7],
    }
    params = chat(**fields)
    assert (params.presence_penalty, params.frequency_penalty, params.min_p) == (1, -1, 0.2)
    assert params.logit_bias == ((5, 3.0),) and params.allowed_token_ids == (7,)
    request = ChatCompletionRequest.parse({"messages": "hi", "bad_words": ["x"]})
    assert sampling_params(request, MODEL, Defaults(), num_prompt_tokens=1, bad_words=[(5, 6)]).bad_words == ((5, 6),)


# --- where it ends


def test_stop_ids_are_the_models_and_the_requests() -> None:
    assert chat().stop_token_ids == {0, 2}
    assert chat(stop_token_ids=[5]).stop_token_ids == {0, 2, 5}
    assert chat(ignore_eos=True).stop_token_ids == frozenset()
    assert chat(ignore_eos=True, stop_token_ids=[5, 2]).stop_token_ids == {5, 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [1000]},
        {"allowed_token_ids": [999_999]},
        {"logit_bias": {"1000": 1}},
        {"logprob_token_ids": [1000], "logprobs": True},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as error:
        chat(**fields)
    assert error.value.param == next(iter(fields)) and "1000" in error.value.message


# --- logprobs


def test_logprobs_are_limited_by_the_server() -> None:
    assert chat().logprobs is None and chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20 and completion(logprobs=0).logprobs == 0
    for run, fields, param in (
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"prompt_logprobs": 21}, "prompt_logprobs"),
    ):
        with pytest.raises(BadRequest) as error:
            run(**fields)
        assert error.value.param == param


def test_logprobs_without_a_limit_end_at_the_vocabulary() -> None:
    free = dataclasses.replace(MODEL, max_logprobs=-1)
    assert chat(model=free, logprobs=True, top_logprobs=-1).logprobs == -1
    assert chat(model=free, logprobs=True, top_logprobs=999).logprobs == 999
    assert chat(model=free, logprobs=True, top_logprobs=5000).logprobs == -1


def test_an_echoed_prompt_with_logprobs_is_scored() -> None:
    assert completion(echo=True).prompt_logprobs is None
    assert completion(echo=True, logprobs=1).prompt_logprobs == 1
    assert completion(echo=True, logprobs=1, prompt_logprobs=3).prompt_logprobs == 3
    assert completion(logprobs=1).prompt_logprobs is None
    assert chat(echo=True, logprobs=True).prompt_logprobs is None


# --- the prompt


@pytest.mark.parametrize(
    ("keep", "side", "expected"),
    [
        (None, None, (10, 11, 12, 13, 14, 15)),
        (1, None, (15,)),
        (4, None, (12, 13, 14, 15)),
        (4, "left", (12, 13, 14, 15)),
        (4, "right", (10, 11, 12, 13)),
        (6, None, (10, 11, 12, 13, 14, 15)),
        (60, None, (10, 11, 12, 13, 14, 15)),
    ],
)
def test_a_prompt_is_cut_to_its_end_or_its_beginning(
    keep: int | None, side: str | None, expected: tuple[int, ...]
) -> None:
    request = CompletionRequest.parse({"prompt": "hi", "truncate_prompt_tokens": keep, "truncation_side": side})
    assert truncated([10, 11, 12, 13, 14, 15], request, MODEL) == expected


def test_minus_one_leaves_room_for_one_token() -> None:
    request = CompletionRequest.parse({"prompt": "hi", "truncate_prompt_tokens": -1})
    assert truncated(range(100), request, MODEL) == tuple(range(37, 100))


def test_more_than_the_context_cannot_be_kept() -> None:
    request = CompletionRequest.parse({"prompt": "hi", "truncate_prompt_tokens": 65})
    with pytest.raises(BadRequest) as error:
        truncated([1], request, MODEL)
    assert error.value.param == "truncate_prompt_tokens"


# --- any values


values = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 5000),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0, 2, exclude_min=True),
        "max_tokens": st.integers(1, 200),
        "min_tokens": st.integers(0, 70),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 1100), max_size=3),
    },
)


@hypothesis_settings(deadline=None)
@given(values, st.integers(0, 80))
def test_what_reaches_the_engine_is_in_its_ranges(fields: dict[str, Any], num_prompt_tokens: int) -> None:
    try:
        params = completion(num_prompt_tokens, **fields)
    except BadRequest as error:
        assert error.param in ("prompt", "min_tokens", "stop_token_ids")
        return
    assert 1 <= params.max_tokens <= 64 - num_prompt_tokens and params.min_tokens <= params.max_tokens
    assert params.temperature == 0 or params.temperature >= 1e-5
    assert 0 <= params.top_k < 1000 and 0 < params.top_p <= 1 and 0 <= params.min_p <= 1
    assert params.repetition_penalty > 0 and all(token < 1000 for token in params.stop_token_ids)
