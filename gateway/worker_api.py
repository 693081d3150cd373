"""The worker protocol, as the runpod SDK speaks it.

    GET  job-take/<worker>            one job, or 204 after a while
    GET  job-take-batch/<worker>      a list of up to batch_size jobs, or 204
    GET  job-stop/<worker>            ids of jobs to stop, or 204
    POST job-stream/<worker>/<job>    {"output": <one yield>}
    POST job-done/<worker>/<job>      {"output"} | {"error"} | {"status": "IN_PROGRESS", "output"}
    GET  ping/<worker>                job_id=<ids in progress>

All below /worker/<secret>/: the SDK's Authorization header cannot be relied on (a file in the user's home wins over
the environment). Bodies are JSON whatever their content type says. The SDK loses what is answered 4xx or cut off, and
polls again at once after 204, so polls are held and posts are answered 200 even where they are of no use any more.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from gateway import jsontext
from gateway.asgi import ClientGone, read_body, respond, unless_gone
from gateway.broker import Broker
from worker.errors import PayloadTooLarge

log = logging.getLogger("gateway")

PREFIX = "/worker/"
# The SDK gives up after 90 s, and a job handed out at that instant would be lost. Also, a worker that was told to end
# does so only when its polls have returned.
HOLD_S = 8.0
DRAIN_HOLD_S = 0.2
MAX_BATCH = 1000
# job-done repeats all that was streamed.
MAX_POST_BYTES = 64 * 1024 * 1024
# The SDK cuts its list of ids at 64 KiB; one that is nearly as long may not be whole.
MAX_WHOLE_LIST_CHARS = 60_000


class WorkerApi:
    """An ASGI application. Plain, since every streamed chunk passes through it."""

    def __init__(self, broker: Broker, secret: str, hold_s: float = HOLD_S) -> None:
        self._broker = broker
        self._secret = secret.encode()
        self._hold_s = hold_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = scope["path"].removeprefix(PREFIX).split("/")
        if len(parts) not in (3, 4) or not hmac.compare_digest(parts[0].encode("utf-8", "replace"), self._secret):
            await respond(send, 404, b'{"error":"not found"}')
            return
        verb, worker_id, job_id = parts[1], parts[2], parts[3] if len(parts) == 4 else ""
        try:
            if verb in ("job-stream", "job-done"):
                await self._post(verb, worker_id, job_id, receive)
                await respond(send, 200, b"{}")
            elif verb in ("job-take", "job-take-batch"):
                await self._take(verb == "job-take-batch", worker_id, _query(scope), receive, send)
            elif verb == "job-stop":
                await self._stop(worker_id, receive, send)
            elif verb == "ping":
                self._ping(worker_id, _query(scope))
                await respond(send, 200, b"{}")
            else:
                await respond(send, 404, b'{"error":"not found"}')
        except ClientGone:
            pass

    async def _take(self, batch: bool, worker_id: str, query: dict[str, str], receive: Receive, send: Send) -> None:
        worker = self._broker.worker(worker_id)
        limit = min(MAX_BATCH, int(query.get("batch_size") or 1)) if batch else 1
        worker.polled(self._broker.now)
        left = True
        try:
            jobs, left = await unless_gone(receive, self._broker.take(worker, limit, self._hold_s))
        finally:
            worker.poll_ended(self._broker.now, broken_off=left)
        if left:
            self._broker.not_taken(worker, jobs or [])
        elif jobs:
            messages = [job.message() for job in jobs]
            await respond(send, 200, b"[" + b",".join(messages) + b"]" if batch else messages[0])
        else:
            await self._nothing(send)

    async def _stop(self, worker_id: str, receive: Receive, send: Send) -> None:
        worker = self._broker.worker(worker_id)
        worker.polled(self._broker.now)
        left = True
        try:
            job_ids, left = await unless_gone(receive, worker.stops(0 if self._broker.draining else self._hold_s))
        finally:
            worker.poll_ended(self._broker.now, broken_off=left)
        if left:
            for job_id in job_ids or []:
                worker.stop(job_id, self._broker.now)
        elif job_ids:
            await respond(send, 200, jsontext.dumps({"jobsToStop": job_ids}))
        else:
            await self._nothing(send)

    async def _nothing(self, send: Send) -> None:
        """204. During shutdown polls are let go at once, yet not in a tight loop."""
        if self._broker.draining:
            await asyncio.sleep(DRAIN_HOLD_S)
        await respond(send, 204)

    async def _post(self, verb: str, worker_id: str, job_id: str, receive: Receive) -> None:
        try:
            body = await read_body(receive, MAX_POST_BYTES)
            value: Any = jsontext.parse_worker(body)
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except (PayloadTooLarge, ValueError) as error:
            log.error("worker %s posted an unusable %s for job %s: %s", worker_id, verb, job_id, error)
            self._broker.unusable(worker_id, job_id)
            return
        if verb == "job-done":
            self._broker.done(worker_id, job_id, value, len(body))
        elif (job := self._broker.chunk(worker_id, job_id, value.get("output"), len(body))) is not None:
            await job.room()

    def _ping(self, worker_id: str, query: dict[str, str]) -> None:
        if query.get("status") == "unhealthy":
            log.error("worker %s is unhealthy: %s: %s", worker_id, query.get("check"), query.get("reason"))
        listed = query.get("job_id", "")
        self._broker.ping(worker_id, set(listed.split(",")), complete=len(listed) < MAX_WHOLE_LIST_CHARS)


def _query(scope: Scope) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
