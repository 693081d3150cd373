"""The job API: /v2/local/run, /runsync, /status, /stream, /cancel, /retry, /purge-queue, /health.

Answers have the platform's shapes; errors have OpenAI's, as everywhere here.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import jsontext
from gateway.body import read_json
from gateway.broker import Broker
from gateway.job import Job, Status
from worker.errors import BadRequest, WorkerError

MAX_RUN_BYTES = 10_000_000
MAX_RUNSYNC_BYTES = 20_000_000
RUN_KEEP_S = 30 * 60.0
RUNSYNC_KEEP_S = 60.0
STREAM_HOLD_S = 1.0  # how long GET /stream waits for something new
DAY_MS = 24 * 3600 * 1000
WEEK_MS = 7 * DAY_MS


class JobNotFound(WorkerError):
    status = 404
    type = "invalid_request_error"
    code = "job_not_found"


class Conflict(WorkerError):
    status = 409
    type = "invalid_request_error"
    code = "conflict"


class JobApi:
    def __init__(self, broker: Broker, execution_timeout_s: float) -> None:
        self._broker = broker
        self._execution_timeout_s = execution_timeout_s

    def routes(self) -> list[Route]:
        return [
            Route("/v2/local/run", self.run, methods=["POST"]),
            Route("/v2/local/runsync", self.runsync, methods=["POST"]),
            Route("/v2/local/status/{job_id}", self.status),
            Route("/v2/local/stream/{job_id}", self.stream),
            Route("/v2/local/cancel/{job_id}", self.cancel, methods=["POST"]),
            Route("/v2/local/retry/{job_id}", self.retry, methods=["POST"]),
            Route("/v2/local/purge-queue", self.purge, methods=["POST"]),
            Route("/v2/local/health", self.health),
        ]

    async def run(self, request: Request) -> Response:
        job = await self._submit(request, "", MAX_RUN_BYTES, RUN_KEEP_S)
        return _json({"id": job.id, "status": job.status.value})

    async def runsync(self, request: Request) -> Response:
        wait_ms = _query_number(request, "wait", default=90_000, low=1000, high=300_000)
        job = await self._submit(request, "sync-", MAX_RUNSYNC_BYTES, RUNSYNC_KEEP_S)
        # The job goes on whatever becomes of this request, as on the platform.
        async for _ in _changes(job, wait_ms / 1000):
            if job.status.final:
                return _json(job.view())
        return _json({"id": job.id, "status": job.status.value})

    async def status(self, request: Request) -> Response:
        job = self._find(request)
        if "ttl" in request.query_params:
            self._broker.keep_for(job, _query_number(request, "ttl", default=0, low=1000, high=WEEK_MS) / 1000)
        return _json(job.view())

    async def stream(self, request: Request) -> Response:
        job = self._find(request)
        async for _ in _changes(job, STREAM_HOLD_S):
            if job.chunks or job.status.final:
                break
        status = job.status.value
        return _json({"status": status, "stream": [{"output": value} for value in job.take_chunks()]})

    async def cancel(self, request: Request) -> Response:
        job = self._find(request)
        self._broker.cancel(job)
        return _json({"id": job.id, "status": job.status.value})

    async def retry(self, request: Request) -> Response:
        job = self._find(request)
        if job.status not in (Status.FAILED, Status.TIMED_OUT):
            raise Conflict(f"only a failed job can be retried; this one is {job.status.value}")
        if not self._broker.may_retry(job):
            raise Conflict("the job's last run is still being stopped: try again in some seconds")
        self._broker.retry(job)
        return _json({"id": job.id, "status": job.status.value})

    async def purge(self, request: Request) -> Response:
        return _json({"removed": self._broker.purge(), "status": "completed"})

    async def health(self, request: Request) -> Response:
        return _json(self._broker.health())

    def _find(self, request: Request) -> Job:
        job = self._broker.jobs.get(request.path_params["job_id"])
        if job is None or job.interactive:
            raise JobNotFound("no such job: it never existed or its result is no longer kept")
        return job

    async def _submit(self, request: Request, id_prefix: str, limit: int, keep_s: float) -> Job:
        body, value = await read_json(request.receive, request.headers, limit)
        if not isinstance(value.get("input"), dict):
            raise BadRequest("'input' is required and must be an object", param="input")
        if value.get("webhook"):
            raise BadRequest("webhooks are not supported here: ask GET /v2/local/status/<id>", param="webhook")
        timeout_s, ttl_s = self._policy(value.get("policy"))
        job = Job(
            id=f"{id_prefix}{uuid.uuid4()}",
            request=body,
            created=self._broker.now,
            execution_timeout_s=timeout_s,
            keep_s=keep_s,
        )
        self._broker.submit(job, ttl_s)
        return job

    def _policy(self, policy: Any) -> tuple[float, float]:
        """(execution timeout, time to live) in seconds."""
        if policy is None:
            policy = {}
        if not isinstance(policy, dict):
            raise BadRequest("'policy' must be an object", param="policy")
        default_ms = round(self._execution_timeout_s * 1000)
        timeout_ms = _policy_number(policy, "executionTimeout", default_ms, 5000, WEEK_MS)
        return timeout_ms / 1000, _policy_number(policy, "ttl", DAY_MS, 10_000, WEEK_MS) / 1000


async def _changes(job: Job, seconds: float) -> AsyncIterator[None]:
    """Yields now and after every change of `job`, for `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    with contextlib.suppress(TimeoutError):
        while True:
            yield
            async with asyncio.timeout_at(deadline):
                await job.change()


def _policy_number(policy: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = policy.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"'policy.{name}' must be an integer in [{low}, {high}] (ms)", param=f"policy.{name}")
    return value


def _query_number(request: Request, name: str, *, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not low <= int(text) <= high:
        raise BadRequest(f"'{name}' must be an integer in [{low}, {high}] (ms)", param=name)
    return int(text)


def _json(value: Any) -> Response:
    return Response(jsontext.dumps(value), media_type="application/json")
