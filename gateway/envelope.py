"""Reads the error that a worker put into a job, and says what an HTTP client gets for it.

The worker's own errors come as {"status", "error": {message, type, param, code}, "retry_after_s"?} in one string,
since the SDK turns anything else into the text of a Python object. Other strings are what the SDK makes of a handler
that raised; they carry a traceback, which is for the log and not for clients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from worker.errors import InternalError, MethodNotAllowed, Unauthorized, WorkerError, clip

# How the SDK writes a generator handler's exception.
_TRACEBACK = " \ntraceback:"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job has no (or only part of an) answer, ready for HTTP."""

    status: int
    error: dict[str, Any]  # {message, type, param, code}
    retry_after_s: float | None = None
    own_headers: Mapping[str, str] = field(default_factory=dict)  # that go with this status

    @classmethod
    def of(cls, error: WorkerError) -> Failure:
        headers: dict[str, str] = {}
        if isinstance(error, MethodNotAllowed):
            headers["allow"] = error.allow
        elif isinstance(error, Unauthorized):
            headers["www-authenticate"] = "Bearer"
        return cls(error.status, error.body()["error"], error.retry_after_s, headers)

    @property
    def message(self) -> str:
        return str(self.error["message"])

    def body(self) -> bytes:
        return orjson.dumps({"error": self.error})

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return dict(self.own_headers)
        return {**self.own_headers, "retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def read(error: Any) -> Failure:
    """The failure that a job's `error` tells of. Never raises."""
    try:
        carried = orjson.loads(error)
        status, body = carried["status"], carried["error"]
        message = body["message"]
    except (TypeError, KeyError, ValueError):
        return Failure.of(InternalError("the worker failed to process this request"))
    if not isinstance(status, int) or not 400 <= status <= 599 or not isinstance(message, str):
        return Failure.of(InternalError("the worker failed to process this request"))
    retry_after = carried.get("retry_after_s")
    usable = isinstance(retry_after, int | float) and 0 <= retry_after < 1e6
    return Failure(
        status,
        {"message": message, **{key: body.get(key) for key in ("type", "param", "code")}},
        float(retry_after) if usable else None,
    )


def public_text(error: Any) -> str:
    """A job's `error` as the job API shows it: the worker's words without a traceback."""
    if not isinstance(error, str):
        error = json.dumps(error, default=str)
    try:
        told = orjson.loads(error)["error_message"]  # how the SDK writes a plain handler's exception
        return clip(str(told))
    except (TypeError, KeyError, ValueError):
        return clip(error.split(_TRACEBACK, 1)[0], 20_000)
