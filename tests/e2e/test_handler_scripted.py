"""The handler over a scripted engine process: what a client gets, token by token, and what happens when things fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.platform import Platform
from tests.fakes.workers import body_of, chat, completion, error_of, events_of, outputs, worker_for
from worker.tokenizer import Tokenizer
from worker.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOX = [10813, 116, 228]  # one character
STORY = [57, 339, 22045]
MARKS = {
    "fox": "please write a fox",
    "endless": "never stop at all",
    "cut": "cut in the middle of it",
    "story": "tell me one",
    "fails": "this one fails later",
    "hello": "greet me now",
}


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)


@pytest.fixture(scope="module")
def worker(demo_model: Path, tokenizer: Tokenizer) -> Iterator[Worker]:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    answers = {
        "fox": {"token_ids": [19556, *FOX, 17]},
        "endless": {"token_ids": ids(" again and again") * 300, "delay_s": 0.005},
        "cut": {"token_ids": [19556, 10813]},
        "story": {"token_ids": ids("A silver river bends west. And so on.")},
        "fails": {"token_ids": ids("one two three four five six"), "error_after": 3, "delay_s": 0.05},
        "hello": {"token_ids": ids("Hello there, friend")},
    }
    rules = [{"match": ids(MARKS[name]), **rule} for name, rule in answers.items()]
    with worker_for(demo_model, script={"rules": rules}, STREAM_INTERVAL_MS="0", MAX_NUM_SEQS="8") as worker:
        yield worker


def say(mark: str, **body: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": MARKS[mark]}], **body)


async def running(worker: Worker) -> int:
    return int((await body_of(worker, {"openai_route": "/load"}))["server_load"])


async def until_idle(worker: Worker) -> None:
    async with asyncio.timeout(10):
        while await running(worker):
            await asyncio.sleep(0.02)


class TestStream:
    async def test_order_of_a_chat(self, worker: Worker) -> None:
        options = {"include_usage": True}
        events = await events_of(worker, say("hello", stream=True, n=2, stream_options=options))
        assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] > 0
        assert all(event["usage"] is None for event in events[:-1])
        for index in (0, 1):
            mine = [c for event in events for c in event["choices"] if c["index"] == index]
            assert "".join(c["delta"].get("content", "") for c in mine) == "Hello there, friend"
            assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
            assert mine[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
            assert not any("role" in c["delta"] for c in mine[1:])

    async def test_ids_differ_between_requests(self, worker: Worker) -> None:
        first, second = [await events_of(worker, say("hello", stream=True)) for _ in range(2)]
        assert first[0]["id"] != second[0]["id"] and first[0]["id"].startswith("chatcmpl-")

    async def test_running_usage_never_goes_back(self, worker: Worker) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await events_of(worker, say("endless", stream=True, max_tokens=8, stream_options=options))
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[-1] == 8 and max(counts) == 8

    async def test_a_character_of_several_tokens_is_never_broken(self, worker: Worker) -> None:
        events = await events_of(worker, say("fox", stream=True))
        texts = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(texts) == "Hello🦊!" and all("�" not in text for text in texts)

    async def test_usage_comes_unasked_where_the_server_was_told_so(self, demo_model: Path) -> None:
        """ENABLE_FORCE_INCLUDE_USAGE was read, and meant nothing."""
        for forced in ("true", "false"):
            with worker_for(demo_model, script={}, ENABLE_FORCE_INCLUDE_USAGE=forced) as worker:
                for job in (chat(max_tokens=2, stream=True), completion(prompt=[5], max_tokens=2, stream=True)):
                    *chunks, last = await events_of(worker, job)
                    if forced == "true":
                        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
                        assert all(chunk["usage"] is None for chunk in chunks)
                    else:
                        assert last["choices"] and "usage" not in last

    async def test_a_cut_character_is_the_same_streamed_or_not(self, worker: Worker) -> None:
        events = await events_of(worker, say("cut", stream=True, max_tokens=2))
        body = await body_of(worker, say("cut", max_tokens=2))
        streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert streamed == body["choices"][0]["message"]["content"] == "Hello�"
        assert body["usage"]["completion_tokens"] == 2 and body["choices"][0]["finish_reason"] == "length"

    async def test_stream_interval_counts_tokens(self, worker: Worker) -> None:
        events = await events_of(
            worker,
            say(
                "endless",
                stream=True,
                max_tokens=13,
                stream_interval=5,
            ),
        )
        assert len(events) <= 2 + 13 // 5 + 1

    async def test_logprobs_of_held_text_are_not_lost(self, worker: Worker) -> None:
        request = say("story", stream=True, logprobs=True, top_logprobs=2, stop=[" west. And then"])
        events = await events_of(worker, request)
        entries = [
            entry
            for event in events
            for choice in event["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        body = await body_of(worker, {**request, "openai_input": {**request["openai_input"], "stream": False}})
        assert len(entries) == body["usage"]["completion_tokens"]
        assert entries == body["choices"][0]["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


class TestStop:
    async def test_a_stop_string_ends_the_answer_and_the_engines_work(self, worker: Worker) -> None:
        for stream in (True, False):
            request = say("endless", stop=["again again"], stream=stream)
            if stream:
                events = await events_of(worker, request)
                text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
                last = events[-1]["choices"][0]
            else:
                last = (await body_of(worker, request))["choices"][0]
                text = last["message"]["content"]
            assert text == " again and "
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", "again again")
        await until_idle(worker)

    async def test_usage_ends_with_the_stop_string(self, worker: Worker, tokenizer: Tokenizer) -> None:
        body = await body_of(worker, say("story", stop=["river"]))
        used = tokenizer.encode("A silver river", add_special_tokens=False)
        assert body["usage"]["completion_tokens"] == len(used)
        assert body["choices"][0]["message"]["content"] == "A silver "

    async def test_included(self, worker: Worker) -> None:
        body = await body_of(worker, say("story", stop=["bends w"], include_stop_str_in_output=True))
        assert body["choices"][0]["message"]["content"] == "A silver river bends w"

    async def test_eos_is_no_reason_and_a_stop_id_is_one(self, worker: Worker, tokenizer: Tokenizer) -> None:
        body = await body_of(worker, say("story"))
        assert body["choices"][0]["stop_reason"] is None and body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["message"]["content"] == "A silver river bends west. And so on."
        west = tokenizer.encode(" west", add_special_tokens=False)[0]
        body = await body_of(worker, say("story", stop_token_ids=[west], return_token_ids=True))
        choice = body["choices"][0]
        assert (choice["stop_reason"], choice["message"]["content"]) == (west, "A silver river bends")
        assert choice["token_ids"][-1] == west

    async def test_min_tokens_holds_for_stop_strings(self, worker: Worker) -> None:
        body = await body_of(worker, say("endless", stop=["again"], min_tokens=5))
        assert body["usage"]["completion_tokens"] > 5
        assert body["choices"][0]["message"]["content"].startswith(" again and again")


class TestFailure:
    async def test_an_error_in_the_stream_is_an_event_then_done(self, worker: Worker) -> None:
        events = await events_of(worker, say("fails", stream=True, stream_options={"include_usage": True}))
        assert events[-1]["error"]["type"] == "server_error" and events[-1]["error"]["code"]
        assert all(c["finish_reason"] is None for event in events[:-1] for c in event["choices"])
        assert not any(event.get("usage") for event in events[:-1])

    async def test_an_error_of_one_choice_ends_the_others(self, worker: Worker) -> None:
        error = await error_of(worker, completion(prompt=[MARKS["fails"], MARKS["endless"]], max_tokens=500))
        assert error["status"] == 500
        await until_idle(worker)

    async def test_cancel_frees_the_engine(self, worker: Worker) -> None:
        async with Platform() as platform:
            for post_s in (0.0, 1.0):
                platform.post_s = post_s
                platform.chunks.clear()
                task = asyncio.create_task(platform.run(worker.handle, say("endless", stream=True, n=2)))
                while not platform.chunks:
                    await asyncio.sleep(0.01)
                assert await running(worker) == 2
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await until_idle(worker)
            assert platform.done == []

    async def test_a_full_queue_is_429_with_a_time_to_wait(self, demo_model: Path) -> None:
        rules = [{"match": [MARK], "token_ids": [198], "delay_s": 0.05} for MARK in (19556,)]
        limits = {"MAX_NUM_SEQS": "1", "MAX_NUM_QUEUED_REQS": "1"}
        with worker_for(demo_model, script={"rules": rules}, **limits) as small:
            slow = completion(prompt=[19556], max_tokens=50, ignore_eos=True)
            tasks = [asyncio.create_task(outputs(small, slow)) for _ in range(4)]
            answers = [items[0] for items in await asyncio.gather(*tasks)]
            refused = [json.loads(item["error"]) for item in answers if "error" in item]
            assert refused and all(r["status"] == 429 for r in refused)
            assert all(r["error"]["code"] == "rate_limit_exceeded" and r["retry_after_s"] > 0 for r in refused)
            assert any("error" not in item for item in answers)

    @pytest.mark.parametrize("idle", [False, True])
    async def test_the_engines_death_fails_each_job_once_and_ends_the_worker(
        self, demo_model: Path, tokenizer: Tokenizer, idle: bool
    ) -> None:
        exits: list[int] = []
        rules = [
            {"match": [19556], "token_ids": [198], "delay_s": 0.02},
            {"match": [905], "token_ids": [198], "crash_after": 5, "delay_s": 0.02},
        ]
        with worker_for(demo_model, script={"rules": rules}, exits=exits, STREAM_INTERVAL_MS="0") as doomed:
            async with Platform() as platform:
                stream = completion(prompt=[19556], max_tokens=500, ignore_eos=True, stream=True)
                whole = completion(prompt=[19556], max_tokens=500, ignore_eos=True)
                crash = completion(prompt=[905], max_tokens=500, ignore_eos=True)
                jobs = [] if idle else [platform.run(doomed.handle, job) for job in (stream, whole, crash)]
                if idle:
                    await asyncio.create_task(running(doomed))  # a job is a task of its own
                    os.kill(doomed._process.pid, signal.SIGKILL)
                await asyncio.wait_for(asyncio.gather(*jobs), 20)
                async with asyncio.timeout(5):
                    while not exits:
                        await asyncio.sleep(0.02)
                assert exits == [1]
                if not idle:
                    streamed = next(done["output"] for done in platform.done if done.get("output"))
                    assert "".join(streamed).endswith("data: [DONE]\n\n") and '"error"' in streamed[-1]
                    failed = [json.loads(done["error"]) for done in platform.done if done.get("error")]
                    assert [error["status"] for error in failed] == [503, 503]
                # A job that comes now is left for another worker: no answer, no exit held up.
                late = asyncio.create_task(platform.run(doomed.handle, whole))
                await asyncio.sleep(0.2)
                assert not late.done()
                late.cancel()


class TestShapes:
    @pytest.mark.parametrize(
        "job_input",
        [
            {"openai_route": "/v1/models"},
            {"openai_route": "/v1/models", "openai_input": {}},
            {"openai_route": "/v1/models", "openai_input": None},
        ],
    )
    async def test_models(self, worker: Worker, job_input: Any) -> None:
        body = await body_of(worker, job_input)
        assert body["object"] == "list" and body["data"][0]["max_model_len"] == 2048

    @pytest.mark.parametrize(
        "job_input",
        [
            {"prompt": MARKS["hello"]},
            {"messages": [{"role": "user", "content": MARKS["hello"]}]},
            {"messages": MARKS["hello"]},
            {"openai_input": {"messages": [{"role": "user", "content": MARKS["hello"]}]}},
            {"route": "/v1/completions", "method": "POST", "body": {"prompt": MARKS["hello"]}},
        ],
    )
    async def test_generation(self, worker: Worker, job_input: Any) -> None:
        body = await body_of(worker, job_input)
        choice = body["choices"][0]
        assert "Hello there, friend" in (choice.get("text") or choice["message"]["content"])

    @pytest.mark.parametrize(
        "job_input",
        [
            {},
            None,
            "text",
            {"api": {}},
            {"openai_route": "/v1/chat/completions", "openai_input": {}},
            {"openai_route": "/nope", "openai_input": {"x": 1}},
            {"foo": 1},
            {"prompt": "Hi", "sampling_params": {"nope": 1}},
            {"prompt": "Hi", "stream": "false"},
        ],
    )
    async def test_anything_else_is_one_error(self, worker: Worker, job_input: Any) -> None:
        error = await error_of(worker, job_input)
        assert error["status"] in (400, 404) and error["message"]
        assert "Traceback" not in error["message"] and "KeyError" not in error["message"]

    async def test_the_shape_of_old_workers(self, worker: Worker) -> None:
        job = {"prompt": MARKS["story"], "max_batch_size": 4, "stream": True}
        bodies = await outputs(worker, job)
        sizes = [len(body["choices"][0]["tokens"]) for body in bodies]
        assert sizes[:-1] == [1, 3, *[4] * len(sizes)][: len(sizes) - 1] and sizes[-1] <= 4
        text = "".join(delta for body in bodies for delta in body["choices"][0]["tokens"])
        (whole,) = await outputs(worker, {**job, "stream": False})
        assert whole["choices"] == [{"tokens": [text]}] and text == "A silver river bends west. And so on."
        assert bodies[-1]["usage"] == whole["usage"]

    async def test_health_and_metrics(self, worker: Worker) -> None:
        assert (await body_of(worker, {"openai_route": "/health"}))["status"] == "ok"
        (text,) = await outputs(worker, {"openai_route": "/metrics"})
        assert "vllm:num_requests_running" in text and "vllm:request_success_total" in text

    async def test_tokenize_and_back(self, worker: Worker) -> None:
        body = await body_of(worker, {"openai_route": "/tokenize", "openai_input": {"prompt": "Hello world"}})
        assert (body["tokens"], body["count"]) == ([19556, 905], 2)
        job = {"openai_route": "/detokenize", "openai_input": {"tokens": [19556, 905]}}
        assert await body_of(worker, job) == {"prompt": "Hello world"}
        error = await error_of(worker, {"openai_route": "/detokenize", "openai_input": {"tokens": [10**6]}})
        assert error["param"] == "tokens"

    async def test_render_tells_what_was_built(self, worker: Worker) -> None:
        job = {
            "openai_route": "/v1/chat/completions/render",
            "openai_input": {"messages": "Hi", "stop": ["x"], "top_k": 5},
        }
        body = await body_of(worker, job)
        assert body["count"] == 31 == len(body["token_ids"]) and body["prompt"].endswith("<|im_start|>assistant\n")
        assert (body["stop"], body["stop_token_ids"]) == (["x"], [2])
        assert body["sampling_params"]["top_k"] == 5 and body["template"]["why"]

    async def test_models_by_name(self, worker: Worker) -> None:
        served = worker.model.names[0]
        assert (await body_of(worker, {"openai_route": f"/v1/models/{served.lower()}"}))["id"] == served
        error = await error_of(worker, {"openai_route": "/v1/models/other"})
        assert (error["status"], error["code"]) == (404, "model_not_found")
        error = await error_of(worker, chat(model="other"))
        assert (error["status"], error["code"], error["param"]) == (404, "model_not_found", "model")
