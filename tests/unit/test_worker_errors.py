"""Errors know their status and their OpenAI body, and never say too much."""

from __future__ import annotations

import json

import pytest

from worker import errors
from worker.errors import MAX_MESSAGE_CHARS, BadRequest, RateLimited, WorkerError, clip


@pytest.mark.parametrize(
    ("kind", "status", "type_", "code"),
    [
        (errors.BadRequest, 400, "invalid_request_error", "invalid_value"),
        (errors.ContextLength, 400, "invalid_request_error", "context_length_exceeded"),
        (errors.Unauthorized, 401, "invalid_request_error", "invalid_api_key"),
        (errors.ModelNotFound, 404, "invalid_request_error", "model_not_found"),
        (errors.RouteNotFound, 404, "invalid_request_error", "unknown_url"),
        (errors.MethodNotAllowed, 405, "invalid_request_error", "method_not_allowed"),
        (errors.PayloadTooLarge, 413, "invalid_request_error", "request_too_large"),
        (errors.RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.InternalError, 500, "server_error", "server_error"),
        (errors.Unavailable, 503, "server_error", "server_error"),
    ],
)
def test_the_status_type_and_code_of_each(kind: type[WorkerError], status: int, type_: str, code: str) -> None:
    more = {"allow": "GET, HEAD"} if kind is errors.MethodNotAllowed else {}
    error = kind("it's wrong", param="n", **more)
    assert error.status == status
    assert error.body() == {"error": {"message": "it's wrong", "type": type_, "param": "n", "code": code}}


def test_a_code_of_its_own_and_a_time_to_wait() -> None:
    assert BadRequest("x", code="invalid_type").code == "invalid_type" and BadRequest("x").code == "invalid_value"
    assert RateLimited("x", retry_after_s=1.5).retry_after_s == 1.5


def test_a_message_is_bounded_and_can_be_sent() -> None:
    error = BadRequest("a\ud83d" + "x" * 10**6)
    assert len(error.message) == MAX_MESSAGE_CHARS and error.message.endswith("…")
    json.dumps(error.body(), ensure_ascii=False).encode()


def test_clip_keeps_what_fits() -> None:
    assert clip("abc", 3) == "abc" and clip("abcd", 3) == "ab…" and clip("é\udd8a", 5) == "é?"
