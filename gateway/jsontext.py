"""JSON at the gateway's borders: strict towards users, lenient towards workers.

A user's body is checked once and then handed on as the bytes it came in. A worker's body may hold NaN (Python's
json writes it), which becomes null. Nothing that leaves here is invalid JSON or invalid UTF-8.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from worker.errors import BadRequest

# A job whose JSON the worker's parser cannot take (Python stops at about 1000 levels) would be lost on the way, and
# all jobs of its batch with it. The worker itself refuses bodies deeper than 200 with an error of its own.
MAX_DEPTH = 300


def parse_request(body: bytes) -> dict[str, Any]:
    """The object that a user sent. Raises BadRequest for everything else."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object", code="invalid_json")
    # Counting brackets is much cheaper than walking, and few bodies hold enough of them to be deep.
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise BadRequest(f"the request body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def extend(body: bytes, extra: dict[str, Any]) -> bytes:
    """`body` (the text of an object) with `extra` added; of a key that is in both, JSON parsers take the later."""
    if not extra:
        return body
    head = body.strip()[:-1].rstrip()
    separator = b"" if head == b"{" else b","
    return head + separator + orjson.dumps(extra)[1:]


def parse_worker(body: bytes) -> Any:
    """What a worker posted. NaN and infinities become None. Raises ValueError."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return json.loads(body, parse_constant=lambda _: None)
        except RecursionError:
            raise ValueError("nested too deep") from None


def dumps(value: Any) -> bytes:
    """`value` as JSON bytes; non-finite numbers as null, half surrogate pairs replaced."""
    try:
        return orjson.dumps(value)
    except TypeError:  # a half surrogate pair, or nested deeper than orjson writes
        return json.dumps(_finite(value), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """For the slow path, whose writer knows no way to replace NaN."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
