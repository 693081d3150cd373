"""Between an answer that is being made and the platform that POSTs what the handler yields.

The SDK sends one yield at a time and waits for its POST. So a producer fills an outbox, and each yield carries
everything gathered since the last: the first output at once, the next ones `interval_s` apart. A stream's yields are
whole server-sent events, as long as these fit; anything else is yielded as it is. This is the one place that writes
the error envelope:

    before any output   {"error": '{"status": 404, "error": {...}}'}      (a string survives the SDK)
    after it            an error event, then [DONE]

The engine's share is given up from a done-callback of the job's task: a cancel that hits the SDK during a POST never
reaches the handler's own code. Knows nothing of OpenAI's bodies or of the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import orjson

from worker.errors import BadRequest, InternalError, WorkerError
from worker.protocol import sse

log = logging.getLogger("worker")

# The platform takes 1 MB of JSON for one yield; a character is up to four bytes, and quoting adds about a third.
MAX_YIELD_CHARS = 250_000
# ... and 20 MB for a whole answer, of a stream all of its yields together.
MAX_BODY_BYTES = 20_000_000
_TOO_LARGE = f"the answer is larger than {MAX_BODY_BYTES // 1_000_000} MB: ask for less"


class Outbox:
    """What is made and not yet yielded. Filled without waiting; one reader."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._filled = asyncio.Event()  # there is something to take, or nothing more will come
        self._closed = asyncio.Event()

    def send(self, item: Any) -> None:
        self._items.append(item)
        self._filled.set()

    def close(self) -> None:
        self._filled.set()
        self._closed.set()

    def clear(self) -> None:
        self._items.clear()

    def __bool__(self) -> bool:
        return bool(self._items)

    def take(self) -> Any:
        """The next yield: a run of texts joined, a part of one that is too long, or one other item."""
        first = self._items.popleft()
        if isinstance(first, str):
            if len(first) > MAX_YIELD_CHARS:
                self._items.appendleft(first[MAX_YIELD_CHARS:])
                first = first[:MAX_YIELD_CHARS]
            texts, size = [first], len(first)
            while self._items and isinstance(self._items[0], str) and size + len(self._items[0]) <= MAX_YIELD_CHARS:
                texts.append(self._items.popleft())
                size += len(texts[-1])
            first = "".join(texts)
        if not self._items and not self._closed.is_set():
            self._filled.clear()
        return first

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    async def wait(self, timeout_s: float | None) -> bool:
        """Waits for something to take, or for the end; false where the time ran out."""
        return await _set_within(self._filled, timeout_s)

    async def wait_for_end(self, timeout_s: float) -> bool:
        return await _set_within(self._closed, timeout_s)


async def _set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    if event.is_set() or (timeout_s is not None and timeout_s <= 0):
        return event.is_set()
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


class Answer(Protocol):
    """An answer in the making (`serving.Answer`)."""

    @property
    def id(self) -> str:
        """For the log, and for the message of an error whose cause only the log tells."""

    @property
    def events(self) -> bool:
        """Whether it is a stream of server-sent events."""

    async def run(self, send: Callable[[Any], None]) -> None:
        """Makes it; raises WorkerError where that fails."""

    def abort(self) -> None:
        """Gives up what the engine still does for it. Synchronous, idempotent."""


async def deliver(answer: Answer, *, interval_s: float, keep_alive_s: float) -> AsyncIterator[Any]:
    """What a job's handler yields for `answer`; must run in the job's task. Raises nothing but CancelledError.

    `interval_s`: least time between two yields of a stream, the last excepted. `keep_alive_s`: a stream that was silent
    this long gets a comment (which commits it to status 200); 0 = never.
    """
    outbox = Outbox()
    producer = asyncio.create_task(_produce(answer, outbox))

    def give_up(_: object = None) -> None:
        answer.abort()
        producer.cancel()

    job = asyncio.current_task()
    assert job is not None
    job.add_done_callback(give_up)
    try:
        async for item in _yields(answer, outbox, producer, interval_s, keep_alive_s):
            yield item
    finally:
        give_up()
        job.remove_done_callback(give_up)


async def _yields(
    answer: Answer, outbox: Outbox, producer: asyncio.Task[WorkerError | None], interval_s: float, keep_alive_s: float
) -> AsyncIterator[Any]:
    now = asyncio.get_running_loop().time
    started, next_yield_at = False, now()
    num_bytes = 0
    while True:
        if not await outbox.wait(keep_alive_s if answer.events and keep_alive_s else None):
            started = True
            yield sse.comment("keep-alive")
            continue
        if answer.events and outbox:
            await outbox.wait_for_end(next_yield_at - now())
        failure = await producer if outbox.closed else None
        if failure is not None and (not started or not outbox):
            # Nothing went out: what was made until it failed is no answer, and the status can still be an error's.
            yield _failed(failure, in_stream=started and answer.events)
            return
        if not outbox:
            return
        item, size = _sendable(outbox.take())
        num_bytes += size
        if num_bytes > MAX_BODY_BYTES:
            answer.abort()
            yield _failed(BadRequest(_TOO_LARGE, code="answer_too_large"), in_stream=started and answer.events)
            return
        started, next_yield_at = True, now() + interval_s
        yield item


async def _produce(answer: Answer, outbox: Outbox) -> WorkerError | None:
    try:
        await answer.run(outbox.send)
        return None
    except WorkerError as error:
        return error
    except Exception:
        # A bug of ours: the log gets it all, the client only a sentence.
        log.exception("request %s failed", answer.id)
        return InternalError(f"the server failed to answer request {answer.id}")
    finally:
        # Whoever reads the error may rely on the engine having been told to stop.
        answer.abort()
        outbox.close()


def _sendable(item: Any) -> tuple[Any, int]:
    """`item` as the SDK can send it, and its size in bytes."""
    if not isinstance(item, dict):
        return item, len(item.encode())
    data = sse.dumps(item).encode()
    return orjson.loads(data), len(data)


def _failed(error: WorkerError, *, in_stream: bool) -> Any:
    """The last yield of an answer that failed."""
    return sse.event(error.body()) + sse.DONE if in_stream else envelope(error)


def envelope(error: WorkerError) -> dict[str, str]:
    """The error as one string that carries status and body through the SDK and the platform."""
    carried = {"status": error.status, **error.body()}
    if error.retry_after_s is not None:
        carried["retry_after_s"] = error.retry_after_s
    return {"error": sse.dumps(carried)}
