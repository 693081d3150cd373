"""What an HTTP client gets for the error in a job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.envelope import Failure, public_text, read
from worker.delivery import envelope
from worker.errors import ContextLength, RateLimited


def test_what_the_worker_writes_is_what_is_read() -> None:
    error = ContextLength("too long", param="messages")
    assert read(envelope(error)["error"]) == Failure(400, error.body()["error"])
    limited = read(envelope(RateLimited("busy", retry_after_s=1.2))["error"])
    assert (limited.status, limited.headers()) == (429, {"retry-after": "2"})


@pytest.mark.parametrize(
    "error",
    [
        "handler: boom at /srv/x.py \ntraceback: File ...",
        "{'message': 'a python dict'}",
        {"message": "a dict"},
        None,
        "[]",
        "7",
        '{"status": 200, "error": {"message": "x"}}',
        '{"status": true, "error": {"message": "x"}}',
        '{"status": 404, "error": "x"}',
        '{"status": 404, "error": {"message": 5}}',
        '{"status": 404}',
        json.dumps({"error_type": "x", "error_message": "y", "error_traceback": "z"}),
    ],
)
def test_anything_else_is_a_server_error_that_quotes_nothing(error: Any) -> None:
    failure = read(error)
    assert failure.status == 500
    assert failure.error["message"] == "the worker failed to process this request"


@given(st.one_of(st.text(), st.recursive(st.none() | st.text(), lambda inner: st.lists(inner)), st.floats()))
def test_reading_never_fails(error: Any) -> None:
    assert 400 <= read(error).status <= 599
    public_text(error).encode()


@pytest.mark.parametrize("retry_after", [-1, float("nan"), "soon", 1e30, None])
def test_a_useless_retry_time_is_left_out(retry_after: Any) -> None:
    text = json.dumps({"status": 429, "error": {"message": "x"}, "retry_after_s": retry_after})
    assert read(text).headers() == {}


def test_the_job_api_shows_the_workers_words_without_a_traceback() -> None:
    assert public_text("handler: boom \ntraceback: File") == "handler: boom"
    assert public_text(json.dumps({"error_message": "boom", "error_traceback": "File"})) == "boom"
    assert public_text('{"status": 404, "error": {}}') == '{"status": 404, "error": {}}'
    assert public_text({"a": 1}) == '{"a": 1}'
