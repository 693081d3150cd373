"""The bounded waiting line of jobs and the pollers that wait for one. Knows nothing of what becomes of a job."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterator

from gateway.job import Job
from worker.errors import RateLimited

MAX_BYTES = 256 * 1024 * 1024


class JobQueue:
    def __init__(self, max_jobs: int) -> None:
        self.max_jobs = max_jobs
        self.closed = False
        self._jobs: dict[str, Job] = {}
        self._bytes = 0
        self._takers: deque[asyncio.Future[None]] = deque()
        self._removals: deque[float] = deque(maxlen=50)  # when the last jobs left the line

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def check_room(self, job: Job) -> None:
        """Raises RateLimited where `job` would be one too many."""
        if len(self._jobs) >= self.max_jobs or self._bytes + len(job.request) > MAX_BYTES:
            raise RateLimited("the queue is full: try again later", retry_after_s=self._retry_after_s())

    def add(self, job: Job) -> None:
        """Queues `job`, full or not: what was accepted once may come back."""
        self._jobs[job.id] = job
        self._bytes += len(job.request)
        self._wake_taker()

    def remove(self, job: Job) -> None:
        del self._jobs[job.id]
        self._bytes -= len(job.request)
        self._removals.append(asyncio.get_running_loop().time())

    async def take(self, limit: int, hold_s: float) -> list[Job]:
        """Up to `limit` jobs, lowest priority value first, then in order of arrival; none after `hold_s` seconds.

        A caller that is cancelled while waiting takes nothing with it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + hold_s
        while not self.closed:
            if self._jobs:
                return self._pop(limit)
            if loop.time() >= deadline:
                return []
            waiter = loop.create_future()
            self._takers.append(waiter)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_taker()  # the call was for whoever takes next
                raise
            finally:
                if waiter in self._takers:
                    self._takers.remove(waiter)
        return []

    def close(self) -> None:
        """No more jobs are given out; pollers leave with nothing."""
        self.closed = True
        while self._takers:
            self._wake_taker()

    def _pop(self, limit: int) -> list[Job]:
        chosen = heapq.nsmallest(limit, self._jobs.values(), key=lambda job: (job.priority, job.sequence))
        for job in chosen:
            self.remove(job)
        if self._jobs:
            self._wake_taker()
        return chosen

    def _wake_taker(self) -> None:
        while self._takers:
            waiter = self._takers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _retry_after_s(self) -> float:
        """About when half of the line will have moved up, at the pace of the last jobs; 1 to 60 s."""
        if len(self._removals) < 2:
            return 1.0
        seconds_each = (self._removals[-1] - self._removals[0]) / (len(self._removals) - 1)
        return min(60.0, max(1.0, seconds_each * len(self._jobs) / 2))
