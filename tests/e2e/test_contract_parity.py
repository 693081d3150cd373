"""Streamed or whole, a request gives the same text, finish reason and usage, whatever its parameters; and a seed
gives the same answer however busy the engine is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, OpenAI

from tests.e2e.served import Served

PROMPTS = ["Say hello.", "Count: one two three", "What is 2+2?", "List three colours 🦊 你好"]

optional_parameters = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12)},
    optional={
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0, 0.5, 1.0, 1.7]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "stop": st.sampled_from(["e", [" the", "\n"], ["zzz"]]),
        "logit_bias": st.sampled_from([{"30": 5}, {"260": -100}]),
    },
)
optional_extras = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 20]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.2]),
        "min_tokens": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "stop_token_ids": st.sampled_from([[], [30], [198, 28]]),
        "bad_words": st.sampled_from([[], ["hello"]]),
        "best_of": st.just(3),
    },
)


def collected(stream: Any, text_of: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """(text by choice, finish reason by choice, usage) of a stream."""
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in finishes, "a choice went on after its end"
            texts[choice.index] = texts.get(choice.index, "") + (text_of(choice) or "")
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    return texts, finishes, usage


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(parameters=optional_parameters, extras=optional_extras, prompt=st.sampled_from(PROMPTS), chat=st.booleans())
def test_streamed_and_whole_answers_are_the_same(
    served: Served, parameters: dict[str, Any], extras: dict[str, Any], prompt: str, chat: bool
) -> None:
    client = OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=120)
    if parameters.get("temperature") != 0 and extras.get("top_k", 0) < 1:
        extras = {
            **extras,
            "top_k": 5,
        }  # of the whole vocabulary, most tokens' shares are narrower than rounding errors
    body = {"model": "SmolLM2-135M-Instruct", "seed": 5, "extra_body": extras, **parameters}
    usage_wanted: Any = {"stream": True, "stream_options": {"include_usage": True}}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
        whole = client.chat.completions.create(**body)
        texts = {choice.index: choice.message.content or "" for choice in whole.choices}
        stream = client.chat.completions.create(**body, **usage_wanted)
        streamed, finishes, usage = collected(stream, lambda choice: choice.delta.content)
    else:
        body["prompt"] = prompt
        whole = client.completions.create(**body)
        texts = {choice.index: choice.text for choice in whole.choices}
        stream = client.completions.create(**body, **usage_wanted)
        streamed, finishes, usage = collected(stream, lambda choice: choice.text)
    assert streamed == texts
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.slow
async def test_a_seed_gives_the_same_answer_however_busy_the_engine_is(served: Served) -> None:
    async with AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=120) as client:

        async def answer(seed: int) -> str:
            got = await client.chat.completions.create(
                model="SmolLM2-135M-Instruct",
                messages=[{"role": "user", "content": "Tell me something."}],
                temperature=1.0,
                max_tokens=10,
                seed=seed,
                extra_body={"top_k": 20},
            )
            return got.choices[0].message.content or ""

        alone = [await answer(seed) for seed in range(6)]
        assert len(set(alone)) > 3, "different seeds should give different answers"
        busy = await asyncio.gather(*[answer(seed % 6) for seed in range(24)])
        assert busy == [alone[seed % 6] for seed in range(24)]
