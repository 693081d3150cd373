"""A job's output as one HTTP answer: the first output decides what kind of answer it is.

A stream without any output yet, in the queue or at a worker, gets a comment now and then, so that proxies keep its
connection: the first one commits it to status 200 and events, and an error that comes later is an event. Between
outputs the comments are the worker's business.

an error before any output    its HTTP status and body, whether a stream was asked for or not
text of server-sent events    relayed as it comes; a failure later becomes an error event, then [DONE]
an object                     a JSON answer, sent at once
other text                    gathered to the end and sent whole
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from starlette.types import Send

from gateway import jsontext
from gateway.asgi import ClientGone, respond
from gateway.envelope import Failure
from gateway.job import Job
from worker.errors import InternalError

log = logging.getLogger("gateway")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# A reader that takes nothing for so long is treated as gone; until then its job waits for it.
STALLED_AFTER_S = 30.0
_EVENT_STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_EVENT_STARTS = ("data:", ":", "event:", "id:", "retry:")
_IGNORED_COMMENT = re.compile(r": ignored-fields ([\x20-\x7e]{1,1000})\n")
_NO_OUTPUT = Failure.of(InternalError("the worker gave no answer"))


async def answer(
    job: Job, send: Send, media_type: str, *, keep_alive_s: float = 0, stalled_after_s: float = STALLED_AFTER_S
) -> bool:
    """Sends the answer, from the first output to the end; true then. Raises ClientGone where the reader has stalled.

    `keep_alive_s`: of a stream, seconds from one comment to the next until there is output; 0 = none.
    """
    began = False
    while not job.chunks and not job.status.final:
        if await _changed(job, keep_alive_s):
            continue
        if not began:
            await _begin_stream(send, {})
            began = True
        await _send_part(send, KEEP_ALIVE, job, stalled_after_s)
    values = job.take_chunks()
    if not values and job.failure is None:
        values = job.output if isinstance(job.output, list) else [] if job.output is None else [job.output]
    if began:
        await _stream(job, values, send, stalled_after_s)
    elif not values:
        await fail(send, job.failure or _NO_OUTPUT)
    elif isinstance(values[0], str) and values[0].startswith(_EVENT_STARTS):
        await _begin_stream(send, _ignored_fields(values[0]))
        await _stream(job, values, send, stalled_after_s)
    elif isinstance(values[0], str):
        await _gather(job, values, send, media_type)
    else:
        await respond(send, 200, jsontext.dumps(values[0]), headers=_ignored_fields(values[0]))
    return True


async def fail(send: Send, failure: Failure) -> None:
    await respond(send, failure.status, failure.body(), headers=failure.headers())


async def _changed(job: Job, seconds: float) -> bool:
    """Waits for a change of the job; false where none has come in time. 0 = any time."""
    try:
        async with asyncio.timeout(seconds or None):
            await job.change()
    except TimeoutError:
        return False
    return True


async def _begin_stream(send: Send, further: dict[str, str]) -> None:
    headers = {**_EVENT_STREAM, **further, "content-type": "text/event-stream; charset=utf-8"}
    fields = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": fields})


async def _stream(job: Job, values: list[Any], send: Send, stalled_after_s: float) -> None:
    data = b""
    while True:
        if values:
            data = encode(values)
            await _send_part(send, data, job, stalled_after_s)
        if data.endswith(DONE) or (job.status.final and not job.chunks):
            break
        if not job.chunks:
            await job.change()
        values = job.take_chunks()
    await send({"type": "http.response.body", "body": _rest(job, data)})


async def _send_part(send: Send, data: bytes, job: Job, stalled_after_s: float) -> None:
    try:
        async with asyncio.timeout(stalled_after_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    except TimeoutError:
        log.warning("job %s: its reader has taken nothing for %g s and is cut off", job.id, stalled_after_s)
        raise ClientGone from None


def _rest(job: Job, sent: bytes) -> bytes:
    """What a stream that has begun still needs, to end as clients expect."""
    if sent.endswith(DONE):
        return b""
    gap = b"" if not sent or sent.endswith(b"\n\n") else b"\n\n"
    event = b"data: " + job.failure.body() + b"\n\n" if job.failure else b""
    return gap + event + DONE


async def _gather(job: Job, values: list[Any], send: Send, media_type: str) -> None:
    while not job.status.final:
        await job.change()
        values += job.take_chunks()
    if job.failure is not None:
        await fail(send, job.failure)
        return
    text = "".join(value for value in values if isinstance(value, str))
    await respond(send, 200, text.encode("utf-8", "replace"), media_type)


def encode(values: list[Any]) -> bytes:
    """Texts as they are, anything else as one event each."""
    if all(isinstance(value, str) for value in values):
        return "".join(values).encode("utf-8", "replace")
    return b"".join(
        value.encode("utf-8", "replace") if isinstance(value, str) else b"data: " + jsontext.dumps(value) + b"\n\n"
        for value in values
    )


def _ignored_fields(first: Any) -> dict[str, str]:
    """The header that names request fields the worker did not know. It says so in the answer: by the key
    `ignored_fields` of an object, by a comment at the head of a stream."""
    if isinstance(first, str):
        found = _IGNORED_COMMENT.match(first)
        return {"x-ignored-fields": found[1]} if found else {}
    names = first.get("ignored_fields") if isinstance(first, dict) else None
    if not isinstance(names, list) or not names:
        return {}
    text = ", ".join(str(name) for name in names)[:1000]
    return {"x-ignored-fields": re.sub(r"[^\x20-\x7e]", "?", text)}
