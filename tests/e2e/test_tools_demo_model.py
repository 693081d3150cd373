"""Constraints on the demo model, which can follow none of them by itself: what it says is valid all the same."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.test_tools_scripted import whole
from tests.fakes.workers import body_of, chat, completion, error_of, events_of, worker_for
from worker.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PING = {
    "type": "object",
    "properties": {"word": {"type": "string", "enum": ["blue"]}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "ping", "parameters": PING}}
NAMED = {"type": "function", "function": {"name": "ping"}}
USE_IT = [{"role": "user", "content": "Use the tool ping with word blue."}]
POINT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
NEWLINE = "198"


@pytest.fixture(scope="module")
def worker(demo_model: Path) -> Iterator[Worker]:
    with worker_for(demo_model, DTYPE="float32", MAX_NUM_SEQS="8") as worker:
        yield worker


def schema(of: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": of}}


async def content(worker: Worker, **body: Any) -> str:
    answer = await body_of(worker, chat(temperature=0, **{"messages": USE_IT, "max_tokens": 48, **body}))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_call(worker: Worker, choice: Any) -> None:
    body = {"messages": USE_IT, "temperature": 0, "max_tokens": 96, "tools": [TOOL], "tool_choice": choice}
    answer = (await body_of(worker, chat(**body)))["choices"][0]
    told = whole(await events_of(worker, chat(stream=True, **body)))
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "ping" and json.loads(call["function"]["arguments"]) == {"word": "blue"}
    assert told["tool_calls"] == [call["function"]]
    assert answer["finish_reason"] == told["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"use_beam_search": True, "n": 2}], ids=["alone", "two", "beams"])
async def test_a_forced_call_cut_by_the_token_limit(worker: Worker, more: Any) -> None:
    """It is no text, however early it ends, streamed or not; its name comes whole or not at all."""
    named = set()
    for max_tokens in (1, 3, 5, 8, 11, 14):
        body = {"messages": USE_IT, "temperature": 0, "max_tokens": max_tokens, "tools": [TOOL], **more}
        for choice in ("required", NAMED):
            answer = await body_of(worker, chat(tool_choice=choice, **body))
            events = await events_of(worker, chat(tool_choice=choice, stream=True, **body))
            for told in answer["choices"]:
                message = told["message"]
                assert message["content"] is None and told["finish_reason"] == "length", told
                calls = [call["function"] for call in message.get("tool_calls") or []]
                assert [call["name"] for call in calls] in ([], ["ping"])
                mine = [{"choices": [c for c in e["choices"] if c["index"] == told["index"]]} for e in events]
                assert whole(mine)["tool_calls"] == calls and whole(mine)["finish_reason"] == "length"
                assert not any(
                    "content" in c["delta"] and c["delta"]["content"] is not None for e in mine for c in e["choices"]
                )
                named.add(bool(calls))
    assert named == {False, True}


async def test_more_beams_than_there_are_texts(worker: Worker) -> None:
    body = {"messages": USE_IT, "use_beam_search": True, "n": 3, "structured_outputs": {"choice": ["yes"]}}
    answer = await body_of(worker, chat(**body))
    assert [c["message"]["content"] for c in answer["choices"]] == ["yes"] * 3
    events = await events_of(worker, chat(stream=True, **body))
    finishes = [c["index"] for event in events for c in event["choices"] if c["finish_reason"] == "stop"]
    assert sorted(finishes) == [0, 1, 2]


async def test_a_forced_function_call_of_old_clients(worker: Worker) -> None:
    body = {"messages": USE_IT, "temperature": 0, "functions": [TOOL["function"]], "function_call": {"name": "ping"}}
    call = (await body_of(worker, chat(**body)))["choices"][0]["message"]["function_call"]
    assert call["name"] == "ping" and json.loads(call["arguments"]) == {"word": "blue"}


async def test_a_schema_keeps_its_order_and_validates(worker: Worker) -> None:
    thoughts = {
        "type": "object",
        "properties": {"thoughts": {"type": "string", "maxLength": 10}, "answer": {"type": "integer", "maximum": 99}},
        "required": ["thoughts", "answer"],
        "additionalProperties": False,
    }
    value = json.loads(await content(worker, response_format=schema(thoughts)))
    jsonschema.validate(value, thoughts)
    assert list(value) == ["thoughts", "answer"]


@pytest.mark.parametrize("format", [schema(POINT), {"type": "json_object"}], ids=["schema", "object"])
async def test_a_model_that_wants_nothing_but_new_lines(worker: Worker, format: Any) -> None:
    body = {"messages": USE_IT, "temperature": 0, "max_tokens": 40, "logit_bias": {NEWLINE: 100}}
    answer = await body_of(worker, chat(response_format=format, **body))
    text = answer["choices"][0]["message"]["content"]
    assert not re.search(r"\s{17}", text)
    if format["type"] == "json_schema":
        jsonschema.validate(json.loads(text), POINT)
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_other_constraints(worker: Worker) -> None:
    assert await content(worker, guided_choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch(r"[0-9]{3}", await content(worker, structured_outputs={"regex": "[0-9]{3}"}))
    assert await content(worker, guided_grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert await content(worker, guided_choice=["日本", "🦊"]) in ("日本", "🦊")
    answer = await body_of(worker, completion(prompt="One two", guided_regex=" [a-z]{4}", max_tokens=16))
    assert re.fullmatch(r" [a-z]{4}", answer["choices"][0]["text"])


async def test_several_choices_and_logprobs(worker: Worker) -> None:
    body = {"messages": USE_IT, "n": 3, "seed": 5, "logprobs": True, "guided_choice": ["left", "right"]}
    answer = await body_of(worker, chat(**body))
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        assert choice["message"]["content"] in ("left", "right") and choice["logprobs"]["content"]


async def test_beams_stay_within_the_constraint(worker: Worker) -> None:
    body = {"messages": USE_IT, "use_beam_search": True, "n": 2, "max_tokens": 24}
    answer = await body_of(worker, chat(guided_choice=["left", "right", "straight on"], **body))
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 2 and set(texts) < {"left", "right", "straight on"}
    answer = await body_of(worker, chat(response_format=schema(POINT), **body))
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), POINT)
        assert choice["finish_reason"] == "stop"
    choice = (await body_of(worker, chat(tools=[TOOL], tool_choice="required", **body)))["choices"][0]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"word": "blue"}


async def test_a_list_that_does_not_fit_ends_with_length(worker: Worker) -> None:
    many = schema({"type": "array", "items": {"type": "integer", "maximum": 9}, "minItems": 500})
    answer = await body_of(worker, chat(messages=USE_IT, max_tokens=12, response_format=many))
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_neighbours_do_not_disturb_each_other(worker: Worker) -> None:
    """Constrained and free rows in one batch say what each says alone, also after one of them has ended."""
    bodies: list[dict[str, Any]] = [
        {"guided_choice": ["yes", "no"]},
        {"max_tokens": 16},
        {"guided_regex": "[0-9]{3}"},
        {"response_format": schema(POINT)},
    ]
    jobs = [chat(messages=USE_IT, temperature=0, **{"max_tokens": 24, **body}) for body in bodies]
    alone = [(await body_of(worker, job))["choices"][0] for job in jobs]
    together = [answer["choices"][0] for answer in await asyncio.gather(*[body_of(worker, job) for job in jobs])]
    assert together == alone


async def test_a_refused_constraint_leaves_the_server_well(worker: Worker) -> None:
    for body in ({"guided_regex": "a{2,1}"}, {"response_format": schema({"type": "objekt"})}):
        assert (await error_of(worker, chat(messages=USE_IT, **body)))["status"] == 400
    assert await content(worker, guided_choice=["fine"]) == "fine"
