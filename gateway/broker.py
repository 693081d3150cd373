"""The life of jobs between users and workers. Knows no HTTP and not what a job is about.

submit -> IN_QUEUE -> take -> IN_PROGRESS -> done -> COMPLETED | FAILED
             |                    |-> cancel, time limit, drain: the worker is told to stop
             |                    '-> worker gone: back to the queue once if it never started, else FAILED
             '-> cancel, purge, time to live
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from gateway import envelope
from gateway.archive import Archive
from gateway.envelope import Failure
from gateway.job import Job, Status
from gateway.queue import JobQueue
from gateway.workers import Worker
from worker.errors import InternalError, PayloadTooLarge, Unavailable

log = logging.getLogger("gateway")

MAX_OUTPUT_BYTES = 20_000_000  # what a polled job may leave unread
# The SDK starts a job within 0.1 s of taking it. One that a dead worker took longer ago than this was running.
STARTED_AFTER_S = 1.0
# Pings in a row that do not name a job its worker should hold, before that counts as lost.
MISSED_PINGS = 3
_SHUTDOWN = Failure.of(Unavailable("the server is shutting down"))
_GONE = Failure.of(Unavailable("the worker ended while it was working on this request"))
_CHUNK_LOST = Failure.of(InternalError("part of the output was lost between the worker and the gateway"))
_UNUSABLE = Failure.of(InternalError("the worker sent an answer that cannot be read"))
_CANCELLED = Failure.of(InternalError("the job was cancelled", code="cancelled"))
_TOO_LARGE = Failure.of(PayloadTooLarge(f"the job's output is larger than {MAX_OUTPUT_BYTES // 1_000_000} MB"))


def _timed_out(message: str) -> Failure:
    return Failure(504, {"message": message, "type": "server_error", "param": None, "code": "timeout"})


class Broker:
    def __init__(self, *, max_queued: int = 1000, on_worker: Callable[[str], None] = lambda worker_id: None) -> None:
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, Worker] = {}
        self.draining = False
        self._on_worker = on_worker  # called with the id of a worker that polls for the first time
        self.counts = {"completed": 0, "failed": 0, "retried": 0}
        self._queue = JobQueue(max_queued)
        self._archive = Archive(on_drop=self._forget)
        self._sequence = 0
        self._limits: dict[str, asyncio.TimerHandle] = {}  # of jobs in progress
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # -- for users --------------------------------------------------------------------------------------------------

    def submit(self, job: Job, ttl_s: float) -> None:
        """Queues `job`. Raises RateLimited when the queue is full, Unavailable during shutdown."""
        if self.draining:
            raise Unavailable(_SHUTDOWN.message)
        self._queue.check_room(job)
        self._sequence += 1
        job.sequence = self._sequence
        self.jobs[job.id] = job
        self._expiries[job.id] = asyncio.get_running_loop().call_later(ttl_s, self._expire, job)
        self._queue.add(job)

    def cancel(self, job: Job) -> None:
        self._end(job, Status.CANCELLED, failure=_CANCELLED)

    def may_retry(self, job: Job) -> bool:
        """Whether the job has failed and its worker has let go of it."""
        stopping = any(job.id in worker.stopping for worker in self.workers.values())
        return job.status in (Status.FAILED, Status.TIMED_OUT) and not stopping

    def retry(self, job: Job) -> None:
        """Queues a job that `may_retry` once more. Its old output is dropped."""
        self._queue.check_room(job)
        self._archive.release(job)
        self.counts["retried"] += 1
        self._requeue(job)

    def purge(self) -> int:
        """Cancels all queued jobs; returns how many."""
        queued = list(self._queue)
        for job in queued:
            self.cancel(job)
        return len(queued)

    def keep_for(self, job: Job, seconds: float) -> None:
        """Sets for how long, from now, the result of a finished job can be asked for."""
        self._archive.extend(job, seconds)

    def health(self) -> dict[str, dict[str, int]]:
        running = sum(1 for worker in self.workers.values() if worker.jobs)
        in_progress = sum(len(worker.jobs) for worker in self.workers.values())
        idle = len(self.workers) - running
        workers = {"idle": idle, "ready": idle, "running": running, "initializing": 0, "throttled": 0, "unhealthy": 0}
        return {"jobs": {**self.counts, "inProgress": in_progress, "inQueue": len(self._queue)}, "workers": workers}

    # -- for workers ------------------------------------------------------------------------------------------------

    def worker(self, worker_id: str) -> Worker:
        """The worker that polls under this id, a new one included."""
        if worker_id not in self.workers:
            self.workers[worker_id] = Worker(worker_id, self.now)
            self._on_worker(worker_id)
        return self.workers[worker_id]

    async def take(self, worker: Worker, limit: int, hold_s: float) -> list[Job]:
        """Up to `limit` jobs for `worker`; waits up to `hold_s` for the first. May be cancelled while it waits."""
        jobs = await self._queue.take(limit, hold_s)
        for job in jobs:
            job.status, job.worker_id, job.started = Status.IN_PROGRESS, worker.id, self.now
            worker.jobs[job.id] = job
            self._limits[job.id] = asyncio.get_running_loop().call_later(job.execution_timeout_s, self._over_limit, job)
            job.notify()
        return jobs

    def not_taken(self, worker: Worker, jobs: list[Job]) -> None:
        """The worker was gone before it could get these."""
        for job in jobs:
            if worker.jobs.pop(job.id, None) is not None:
                self._requeue(job)

    def chunk(self, worker_id: str, job_id: str, value: Any, size: int) -> Job | None:
        """Part of a job's output. None for a job that this worker no longer has to work on."""
        job = self._running(worker_id, job_id)
        if job is None:
            return None
        if not job.interactive and job.unread_bytes + size > MAX_OUTPUT_BYTES:
            self._end(job, Status.FAILED, failure=_TOO_LARGE)
            return None
        job.add_chunk(value, size)
        return job

    def done(self, worker_id: str, job_id: str, body: dict[str, Any], size: int) -> None:
        """What the worker says last about a job (or, with status IN_PROGRESS, in between)."""
        job = self._running(worker_id, job_id)
        if job is None:
            return
        output, error = body.get("output"), body.get("error")
        if body.get("status") == Status.IN_PROGRESS.value:
            job.output = output
            return
        del self.workers[worker_id].jobs[job_id]
        if error:
            self._end(job, Status.FAILED, failure=envelope.read(error), error=envelope.public_text(error))
        elif isinstance(output, list) and output and job.num_chunks and not job.repair(output):
            self._end(job, Status.FAILED, failure=_CHUNK_LOST)
        else:
            self._end(job, Status.COMPLETED, output=output, size=size)

    def unusable(self, worker_id: str, job_id: str) -> None:
        """The worker said something about a job that cannot be read."""
        if (job := self._running(worker_id, job_id)) is not None:
            self._end(job, Status.FAILED, failure=_UNUSABLE)

    def ping(self, worker_id: str, listed: set[str], *, complete: bool) -> None:
        """A worker names the jobs it holds. `complete`: the list was not cut off."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        worker.pinged(self.now)
        worker.confirm_stops(listed, self.now)
        for job in list(worker.jobs.values()):
            if job.id in listed:
                job.listed, job.missed_pings = True, 0
            elif complete:
                job.missed_pings += 1
                if job.missed_pings >= MISSED_PINGS:
                    log.warning("worker %s no longer holds job %s", worker_id, job.id)
                    del worker.jobs[job.id]
                    self._lost(job, started=job.listed)

    def worker_gone(self, worker_id: str, *, clean: bool) -> None:
        """The worker's process has ended. `clean`: by itself, after finishing all jobs it had started."""
        worker = self.workers.pop(worker_id, None)
        for job in list(worker.jobs.values()) if worker else ():
            assert job.started is not None
            self._lost(job, started=not clean and self.now - job.started > STARTED_AFTER_S)

    def sweep(self) -> None:
        """To be called now and then: notices workers that have fallen silent."""
        for worker in list(self.workers.values()):
            if worker.lost(self.now):
                log.warning("worker %s has fallen silent", worker.id)
                self.worker_gone(worker.id, clean=False)

    def drain(self) -> None:
        """Ends all jobs, tells the workers to stop theirs, lets their polls go; takes no more."""
        self.draining = True
        self._queue.close()
        for job in list(self.jobs.values()):
            self._end(job, Status.FAILED, failure=_SHUTDOWN)
        for worker in self.workers.values():
            worker.release_poll()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _running(self, worker_id: str, job_id: str) -> Job | None:
        worker = self.workers.get(worker_id)
        return worker.jobs.get(job_id) if worker else None

    def _lost(self, job: Job, *, started: bool) -> None:
        """Its worker no longer has it. Where nothing ran and nothing was sent, another may try, once."""
        if started or job.num_chunks or job.requeued or self.draining:
            self._end(job, Status.FAILED, failure=_GONE)
        else:
            job.requeued = True
            self._requeue(job)

    def _requeue(self, job: Job) -> None:
        self._clear(self._limits, job)
        job.reset()
        self._queue.add(job)
        job.notify()

    def _end(
        self, job: Job, status: Status, *, output: Any = None, failure: Failure | None = None, error: str = "",
        size: int = 0,
    ) -> None:  # fmt: skip
        """The one way into a final state. Does nothing for a job that has reached one."""
        if job.status.final:
            return
        if job.status is Status.IN_QUEUE:
            self._queue.remove(job)
        worker = self.workers.get(job.worker_id or "")
        if worker is not None and worker.jobs.pop(job.id, None) is not None:
            worker.stop(job.id, self.now)
        job.status, job.output, job.failure, job.finished = status, output, failure, self.now
        job.error = (error or failure.message) if failure else None
        if status is Status.COMPLETED:
            job.request = b""  # only a failed job can be retried
        self.counts["completed"] += status is Status.COMPLETED
        self.counts["failed"] += status is Status.FAILED
        self._clear(self._limits, job)
        if job.interactive:
            self._forget(job)
        else:
            self._archive.keep(job, size + job.unread_bytes + len(job.request), job.keep_s)
        job.notify()

    def _forget(self, job: Job) -> None:
        self._clear(self._expiries, job)
        self.jobs.pop(job.id, None)

    def _clear(self, timers: dict[str, asyncio.TimerHandle], job: Job) -> None:
        if (timer := timers.pop(job.id, None)) is not None:
            timer.cancel()

    def _over_limit(self, job: Job) -> None:
        message = f"the job ran longer than its limit of {job.execution_timeout_s:g} s"
        self._end(job, Status.TIMED_OUT, failure=_timed_out(message))

    def _expire(self, job: Job) -> None:
        self._end(job, Status.TIMED_OUT, failure=_timed_out("the job's time to live is over"))
        self._archive.release(job)
        self._forget(job)
