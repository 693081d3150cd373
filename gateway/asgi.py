"""Small pieces of plain ASGI that the hot paths share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Send

from worker.errors import PayloadTooLarge

T = TypeVar("T")

# What is read and thrown away of a body that nobody wants, so that its sender gets to read the answer.
_DISCARD_BYTES = 64 * 1024 * 1024
_DISCARD_S = 5.0


class ClientGone(Exception):
    """The peer has closed the connection. Nobody is left to answer."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises PayloadTooLarge as soon as it is beyond `limit` bytes, ClientGone where it never ends."""
    parts: list[bytes] = []
    size = 0
    async for part in _body_parts(receive):
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit // 1_000_000} MB")


async def _body_parts(receive: Receive) -> Any:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def discard(receive: Receive) -> None:
    """Reads what still comes of a body and keeps nothing of it, for a while."""
    seen = 0
    with contextlib.suppress(TimeoutError, ClientGone):
        async with asyncio.timeout(_DISCARD_S):
            async for part in _body_parts(receive):
                seen += len(part)
                if seen > _DISCARD_BYTES:
                    return


async def gone(receive: Receive) -> None:
    """Returns when the peer closes the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> tuple[T | None, bool]:
    """(result of `work`, whether the peer is gone). `work` is cancelled when the peer goes; then there is no result,
    unless it was ready in the same instant."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        left = watch.done()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        return (None if task.cancelled() else task.result()), left
    finally:
        task.cancel()
        watch.cancel()


async def respond(
    send: Send, status: int, body: bytes = b"", content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """One whole answer."""
    fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    if status != 204:
        fields.append((b"content-type", content_type.encode("latin-1")))
        fields.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})
