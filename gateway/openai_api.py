"""HTTP request -> queued job -> HTTP answer, for the routes that a worker answers."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway import jsontext, relay
from gateway.asgi import unless_gone
from gateway.body import read_json
from gateway.broker import Broker
from gateway.job import Job
from gateway.routes import Route, find
from worker.errors import BadRequest

MAX_BODY_BYTES = 20_000_000
TTL_S = 24 * 3600.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class OpenAiApi:
    """An ASGI application that answers every route of `routes`, and 404 or 405 to all others."""

    def __init__(self, broker: Broker, execution_timeout_s: float, keep_alive_s: float) -> None:
        self._broker = broker
        self._execution_timeout_s = execution_timeout_s
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = find(scope["method"], scope["path"])
        headers = Headers(scope=scope)
        job = Job(
            id=str(uuid.uuid4()),
            request=b"",
            created=self._broker.now,
            execution_timeout_s=self._execution_timeout_s,
        )
        job.request, streams = await self._request(route, headers, receive, scope, job)
        self._broker.submit(job, TTL_S)
        answered: bool | None = False
        try:
            keep_alive_s = self._keep_alive_s if streams else 0
            work = relay.answer(job, send, route.media_type, keep_alive_s=keep_alive_s)
            answered, _ = await unless_gone(receive, work)
        finally:
            # Whoever asked is gone: nobody needs the rest. (A job that has ended does not notice.)
            if not answered:
                self._broker.cancel(job)

    async def _request(
        self, route: Route, headers: Headers, receive: Receive, scope: Scope, job: Job
    ) -> tuple[bytes, bool]:
        """The job as it is queued, and whether it asks for a stream. Headers do not reach a worker, so what matters of
        them goes into the body."""
        name = jsontext.dumps(route.name)
        if route.method == "GET":  # or HEAD: the server leaves the answer's body out
            return b'{"input":{"openai_route":' + name + b"}}", False
        optional = route.name == "/reset_prefix_cache"
        body, value = await read_json(receive, headers, MAX_BODY_BYTES, optional=optional)
        extra = _from_headers(headers)
        own = value.get("request_id")
        if "request_id" not in extra and own is None:
            extra["request_id"] = scope["state"]["request_id"]
        elif "request_id" in extra or isinstance(own, str):  # anything else is for the worker to refuse
            scope["state"]["request_id"] = extra.get("request_id", own)
        priority = extra.get("priority", value.get("priority"))
        job.priority = priority if isinstance(priority, int) and not isinstance(priority, bool) else 0
        streams = route.streams and value.get("stream") is True
        return b'{"input":{"openai_route":' + name + b',"openai_input":' + jsontext.extend(body, extra) + b"}}", streams


def _from_headers(headers: Headers) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if (request_id := headers.get("x-request-id")) is not None:
        if not _REQUEST_ID.fullmatch(request_id):
            raise BadRequest("X-Request-Id must be 1 to 128 printable characters", param="X-Request-Id")
        extra["request_id"] = request_id
    if (priority := headers.get("x-priority")) is not None:
        if not re.fullmatch(r"[+-]?\d{1,18}", priority):
            raise BadRequest(f"X-Priority must be an integer, got {json.dumps(priority[:40])}", param="X-Priority")
        extra["priority"] = int(priority)
    return extra
