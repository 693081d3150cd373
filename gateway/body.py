"""A user's request body: bounded, sent as it is, said to be JSON, and an object."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from gateway import jsontext
from gateway.asgi import read_body, too_large
from worker.errors import BadRequest, WorkerError

# Checking a larger body takes long enough to be noticed by every stream, so that is done beside the event loop.
LARGE_BYTES = 1_000_000
# Some clients begin every text with it; JSON parsers may skip it.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Encoded(WorkerError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_encoding"


async def read_json(
    receive: Receive, headers: Headers, limit: int, *, optional: bool = False
) -> tuple[bytes, dict[str, Any]]:
    """The body as it came and what it says. `optional`: none at all counts as {}. Raises WorkerError."""
    _require_plain(headers)
    if (length := headers.get("content-length", "")).isdigit() and int(length) > limit:
        raise too_large(limit)
    body = (await read_body(receive, limit)).removeprefix(_BYTE_ORDER_MARK)
    if not body:
        if optional:
            return b"{}", {}
        raise BadRequest("the request has no body: it takes a JSON object", code="invalid_json")
    _require_json(headers)
    if len(body) > LARGE_BYTES:
        return body, await asyncio.to_thread(jsontext.parse_request, body)
    return body, jsontext.parse_request(body)


def _require_plain(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        shown = json.dumps(encoding[:80])
        raise Encoded(f"the header Content-Encoding is {shown}: send the body as it is", param="Content-Encoding")


def _require_json(headers: Headers) -> None:
    """Refuses bodies that do not say that they are JSON. This also keeps foreign web pages out: a browser asks for
    permission before it sends JSON to another site, but not before it sends plain text."""
    media_type = headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        shown = json.dumps(media_type[:80]) if media_type else "no content type"
        raise BadRequest(f"the content type must be application/json, got {shown}", code="invalid_content_type")
