"""One job: what was asked, how far it is, what came out. Knows no queue, no worker and no HTTP."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gateway import jsontext
from gateway.envelope import Failure

# Unread output of a job whose reader is connected: beyond it the worker's POST waits for the reader.
MAX_UNREAD_BYTES = 256 * 1024


class Status(StrEnum):
    IN_QUEUE = "IN_QUEUE"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"

    @property
    def final(self) -> bool:
        return self not in (Status.IN_QUEUE, Status.IN_PROGRESS)


@dataclass(eq=False, slots=True)
class Job:
    id: str
    request: bytes  # JSON object with "input"; the worker gets it with the id added
    created: float  # seconds on the loop's clock, as all times here
    priority: int = 0  # lower first
    execution_timeout_s: float = 600.0
    keep_s: float = 0.0  # how long the result can be asked for; 0 = an HTTP client is connected and reads it
    sequence: int = 0  # order of arrival; kept when the job goes back to the queue

    status: Status = Status.IN_QUEUE
    worker_id: str | None = None
    started: float | None = None
    finished: float | None = None
    requeued: bool = False
    listed: bool = False  # a ping of its worker has named it
    missed_pings: int = 0  # pings in a row that did not

    chunks: deque[tuple[Any, int]] = field(default_factory=deque)  # (value, bytes) of what nobody has read yet
    unread_bytes: int = 0
    num_chunks: int = 0  # ever received
    checksum: int = 0  # of all chunks, to compare with the output that comes at the end
    output: Any = None
    error: str | None = None  # the worker's own words
    failure: Failure | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def interactive(self) -> bool:
        return self.keep_s == 0

    def message(self) -> bytes:
        """The job as a worker gets it."""
        return jsontext.extend(self.request, {"id": self.id})

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Waits for the next change of any kind."""
        await self._changed.wait()

    def add_chunk(self, value: Any, size: int) -> None:
        self.chunks.append((value, size))
        self.unread_bytes += size
        self.num_chunks += 1
        self.checksum = checksum(value, self.checksum)
        self.notify()

    def take_chunks(self) -> list[Any]:
        """Everything unread, each chunk once."""
        values = [value for value, _ in self.chunks]
        if values:
            self.chunks.clear()
            self.unread_bytes = 0
            self.notify()
        return values

    async def room(self) -> None:
        """Waits until the connected reader has taken enough. A polled job never makes its worker wait."""
        while self.interactive and self.unread_bytes > MAX_UNREAD_BYTES and not self.status.final:
            await self.change()

    def reset(self) -> None:
        """Back to the queue, without what an earlier run has left."""
        self.status, self.worker_id, self.started, self.finished = Status.IN_QUEUE, None, None, None
        self.output, self.error, self.failure = None, None, None
        self.chunks.clear()
        self.unread_bytes = self.num_chunks = self.checksum = self.missed_pings = 0
        self.listed = False

    def repair(self, aggregate: list[Any]) -> bool:
        """Adds the chunks at the end that never arrived; false where one is missing before others that did."""
        seen = 0
        for value in aggregate[: self.num_chunks]:
            seen = checksum(value, seen)
        if seen != self.checksum or len(aggregate) < self.num_chunks:
            return False
        for value in aggregate[self.num_chunks :]:
            self.add_chunk(value, 0)
        return True

    def view(self) -> dict[str, Any]:
        """What GET /status shows. Times in milliseconds."""
        shown: dict[str, Any] = {"id": self.id, "status": self.status.value}
        if self.started is not None:
            shown["delayTime"] = round((self.started - self.created) * 1000)
            if self.finished is not None:
                shown["executionTime"] = round((self.finished - self.started) * 1000)
            shown["workerId"] = self.worker_id
        if self.output is not None:
            shown["output"] = self.output
        if self.error is not None:
            shown["error"] = self.error
        return shown


def checksum(value: Any, start: int) -> int:
    data = value.encode("utf-8", "replace") if isinstance(value, str) else jsontext.dumps(value)
    return zlib.crc32(data, start)
