"""Constraints beside other options of a request: what excludes each other is the client's error, and said so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.workers import body_of, chat, error_of, worker_for
from worker.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def worker(demo_model: Path) -> Iterator[Worker]:
    with worker_for(demo_model, DTYPE="float32", MAX_NUM_SEQS="4") as worker:
        yield worker


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "[a-z]{3}", "allowed_token_ids": [33]},
        {"guided_choice": ["x"], "bad_words": ["x"]},
        {"response_format": {"type": "json_object"}, "bad_words": ["{", '{"', "{}", "{\n"]},
    ],
)
async def test_no_token_is_left(worker: Worker, body: dict[str, Any], stream: bool) -> None:
    error = await error_of(worker, chat(temperature=0, max_tokens=4, stream=stream, **body))
    assert (error["status"], error["type"]) == (400, "invalid_request_error")
    assert error["param"] == next(iter(body)) and "exclude each other" in error["message"]
    assert (await body_of(worker, chat(max_tokens=1)))["usage"]["completion_tokens"] == 1


async def test_the_text_of_a_special_token_does_not_end_the_answer(worker: Worker) -> None:
    for body in ({"guided_regex": r"<\|im_end\|>"}, {"guided_choice": ["<|im_end|>", "<|im_end|>"]}):
        (choice,) = (await body_of(worker, chat(temperature=0, max_tokens=30, **body)))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("<|im_end|>", "stop")
