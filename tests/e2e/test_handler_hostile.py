"""Requests that are large, costly or odd, at the handler over a scripted engine: each gets its clear answer, and a
stream beside it goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runpod.serverless.modules.rp_fastapi import WorkerAPI
from starlette.testclient import TestClient

from tests.fakes.workers import body_of, chat, completion, error_of, outputs, worker_for
from worker.tokenizer import Tokenizer
from worker.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = "never stop at all"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
LOOPS = "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def worker(demo_model: Path) -> Iterator[Worker]:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    tokenizer = Tokenizer.load(demo_model)
    rules = [
        {"match": ids(ENDLESS), "token_ids": ids(" on and on") * 600, "delay_s": 0.005},
        {"match": ids("long one"), "token_ids": ids(" on and on") * 1400},
    ]
    environ = {"TRUST_REQUEST_CHAT_TEMPLATE": "1", "STREAM_INTERVAL_MS": "0", "MAX_MODEL_LEN": "8192"}
    with worker_for(demo_model, script={"rules": rules}, **environ) as worker:
        yield worker


def ask(**body: Any) -> dict[str, Any]:
    return chat(**{"messages": [USER], "max_tokens": 1, **body})


def tokenize(**body: Any) -> dict[str, Any]:
    return {"openai_route": "/tokenize", "openai_input": body}


LARGE: list[tuple[str, Any, str | None]] = [
    ("too many messages", ask(messages=[USER] * 150_000), "messages"),
    ("many messages", ask(messages=[USER] * 9_999), "messages"),
    ("many messages, cut", ask(messages=[USER] * 9_999, truncate_prompt_tokens=50), None),
    ("one message of 18 MB", ask(messages=[{**USER, "content": "a b " * 4_500_000}]), "messages"),
    ("the same, cut", ask(messages=[{**USER, "content": "a b " * 4_500_000}], truncate_prompt_tokens=9), "messages"),
    ("a long text to measure", tokenize(prompt="a b " * 100_000, return_token_strs=True), None),
    ("one of 18 MB", tokenize(prompt="a b " * 4_500_000), "prompt"),
    ("a million ids", {"openai_route": "/detokenize", "openai_input": {"tokens": [500] * 1_000_000}}, "tokens"),
    ("ids beyond any context", completion(prompt=[500] * 1_000_000), "prompt"),
    ("many prompts", completion(prompt=["a b " * 500] * 1024, max_tokens=1), None),
    (
        "long bad words",
        completion(prompt=["a"] * 1024, bad_words=[f"{i} " + "ab " * 300 for i in range(128)]),
        "bad_words",
    ),
    ("a template that goes on", ask(chat_template=LOOPS, chat_template_kwargs={"x": [0] * 9_000}), "messages"),
    ("a template that multiplies", ask(chat_template="{{ 'a' * 10**9 }}"), "messages"),
]


@pytest.mark.parametrize(("job", "refused"), [pytest.param(*case[1:], id=case[0]) for case in LARGE])
async def test_a_stream_goes_on_beside_a_large_request(worker: Worker, job: Any, refused: str | None) -> None:
    """No gap of a second: the heavy work is in a thread, or not done at all. (Idle gaps are about 10 ms.)"""
    gaps: list[float] = []

    async def watch() -> None:
        last = time.monotonic()
        stream = ask(messages=[{**USER, "content": ENDLESS}], stream=True, max_tokens=8000)
        async for _ in worker.handle({"id": "watched", "input": stream}):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    watching = asyncio.create_task(watch())
    while len(gaps) < 3:
        await asyncio.sleep(0.01)
    gaps.clear()
    (item,) = await asyncio.create_task(outputs(worker, job))
    await asyncio.sleep(0.05)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert gaps and max(gaps) < 1.0
    if refused is None:
        assert "error" not in item
    else:
        told = json.loads(item["error"])
        assert told["status"] == 400 and told["error"]["param"] == refused and len(item["error"]) < 600


@pytest.mark.parametrize(
    ("ending", "tokens", "words"), [("<file_sep>", {"<file_sep>"}, []), ("[END]", set(), ["[END]"]), ("\n", set(), [])]
)
async def test_what_ends_the_answer_follows_the_requests_own_template(
    worker: Worker, ending: str, tokens: set[str], words: list[str]
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + ending + "{% endfor %}"
    job = {"openai_route": "/v1/chat/completions/render", "openai_input": {"messages": [USER]}}
    usual = await body_of(worker, job)
    own = await body_of(worker, {**job, "openai_input": {"messages": [USER], "chat_template": template}})
    assert (set(usual["stop_tokens"]), usual["stop"]) == ({"<|im_end|>"}, [])
    assert (set(own["stop_tokens"]), own["stop"]) == ({"<|im_end|>"} | tokens, words)  # the first is the model's eos
    ids = sorted(worker.model.tokenizer.added_tokens[token] for token in own["stop_tokens"])
    assert own["sampling_params"]["stop_token_ids"] == ids


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_answer_with_logprobs_is_whole_and_every_yield_fits(worker: Worker, stream: bool) -> None:
    body = {"messages": [{**USER, "content": "long one"}], "max_tokens": 4000, "logprobs": True, "top_logprobs": 20}
    items = await outputs(worker, chat(**body, stream=stream))
    sizes = [len(json.dumps(item, ensure_ascii=False).encode()) for item in items]
    assert sum(sizes) < 20_000_000
    if stream:
        assert max(sizes) < 1_000_000
        events = [json.loads(line[6:]) for line in "".join(items).split("\n\n")[:-2]]
        choices = [choice for event in events for choice in event["choices"]]
        assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == 4000
    else:
        (item,) = items
        assert len(item["choices"][0]["logprobs"]["content"]) == 4000


async def test_jobs_need_no_http_request(worker: Worker) -> None:
    for route, body in (("models", {}), ("chat/completions", {"messages": "hi"}), ("completions", {"prompt": "hi"})):
        for stream in (False, True):
            job = {"openai_route": f"/v1/{route}", "openai_input": {**body, "max_tokens": 2, "stream": stream}}
            assert not [item for item in await outputs(worker, job) if "error" in item]


async def test_the_sdks_own_test_server_is_never_a_500(worker: Worker) -> None:
    api = WorkerAPI({"handler": worker.handle, "return_aggregate_stream": True})
    with TestClient(api.rp_app, raise_server_exceptions=False) as server:
        for job, wrong in (({"messages": 5}, True), ({"foo": 1}, True), ({"prompt": "hi", "max_tokens": 2}, False)):
            answer = await asyncio.to_thread(server.post, "/runsync", json={"input": job})
            assert answer.status_code == 200
            (item,) = answer.json()["output"]
            assert ("error" in item) == wrong and "Traceback" not in answer.text


async def test_a_failure_of_the_engine_tells_a_request_id_and_nothing_else(
    demo_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [{"match": [19556], "token_ids": [198], "error_after": 1}, {"match": [905], "crash_after": 1}]
    caplog.set_level(logging.INFO, "worker")
    with worker_for(demo_model, script={"rules": rules}, exits=[]) as doomed:
        for prompt, status in (([19556], 500), ([905], 503)):
            error = await error_of(doomed, completion(prompt=prompt, max_tokens=9))
            assert (error["status"], error["type"]) == (status, "server_error")
            assert "job-1" in error["message"] and "/" not in error["message"] and "script" not in error["message"][22:]
    assert "job-1" in caplog.text
