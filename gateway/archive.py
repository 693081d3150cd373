"""Finished jobs whose result can still be asked for: bounded in time, number and bytes; the oldest go first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.job import Job

MAX_JOBS = 1000
MAX_BYTES = 256 * 1024 * 1024


class Archive:
    def __init__(self, on_drop: Callable[[Job], None], max_jobs: int = MAX_JOBS, max_bytes: int = MAX_BYTES) -> None:
        self._on_drop = on_drop
        self._max_jobs, self._max_bytes = max_jobs, max_bytes
        self._kept: dict[str, tuple[Job, int, asyncio.TimerHandle]] = {}  # in the order of their end
        self._bytes = 0

    def keep(self, job: Job, size: int, seconds: float) -> None:
        self._kept[job.id] = (job, size, self._timer(job, seconds))
        self._bytes += size
        while len(self._kept) > self._max_jobs or self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept.values()))[0])

    def extend(self, job: Job, seconds: float) -> None:
        """Keeps a kept job for `seconds` from now."""
        if job.id in self._kept:
            _, size, timer = self._kept[job.id]
            timer.cancel()
            self._kept[job.id] = (job, size, self._timer(job, seconds))

    def release(self, job: Job) -> None:
        """The job is no longer finished, or no longer wanted. Calls nobody."""
        if job.id in self._kept:
            _, size, timer = self._kept.pop(job.id)
            timer.cancel()
            self._bytes -= size

    def _timer(self, job: Job, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._drop, job)

    def _drop(self, job: Job) -> None:
        self.release(job)
        self._on_drop(job)
