"""The gateway as one ASGI application, put together from its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.broker import Broker
from gateway.envelope import Failure
from gateway.job_api import JobApi
from gateway.middleware import ApiKey, Cors, EarlyAnswers, Errors, Hosts, RateLimit, RequestId, is_local, wrap
from gateway.openai_api import OpenAiApi
from gateway.worker_api import PREFIX, WorkerApi
from worker.errors import InternalError, MethodNotAllowed, RouteNotFound, Unavailable, WorkerError
from worker.settings import GatewaySettings

PAGE = Path(__file__).with_name("playground.html")
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def build(settings: GatewaySettings, broker: Broker, worker_secret: str) -> ASGIApp:
    jobs = JobApi(broker, settings.execution_timeout_s)
    users = Starlette(
        routes=[*jobs.routes(), Route("/", _page), Route("/health", partial(_health, broker)),
                Route("/ping", partial(_health, broker))],
        exception_handlers={HTTPException: _http_error, WorkerError: _worker_error, Exception: _bug},
    )  # fmt: skip
    users.router.redirect_slashes = False
    users.router.default = OpenAiApi(broker, settings.execution_timeout_s, settings.keep_alive_s)
    layers: list[Callable[[ASGIApp], ASGIApp]] = [RequestId]
    if settings.allowed_hosts or is_local(settings.host):
        layers.append(partial(Hosts, allowed=settings.allowed_hosts))
    layers += [partial(Cors, origins=settings.cors_origins), Errors]
    if settings.api_key:
        layers.append(partial(ApiKey, key=settings.api_key))
    if settings.rate_limit:
        layers.append(partial(RateLimit, limit=settings.rate_limit))
    return EarlyAnswers(_Front(WorkerApi(broker, worker_secret), wrap(users, *layers)))


class _Front:
    """Workers on one side, users on the other: a worker's posts pass through no layer made for users."""

    def __init__(self, workers: ASGIApp, users: ASGIApp) -> None:
        self._workers, self._users = workers, users

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        app = self._workers if scope["path"].startswith(PREFIX) else self._users
        await app(scope, receive, send)


async def _page(request: Request) -> Response:
    return Response(PAGE.read_bytes(), media_type="text/html", headers={"content-security-policy": PAGE_POLICY})


async def _health(broker: Broker, request: Request) -> Response:
    """200 while a worker is there to answer, for load balancers and start scripts."""
    if not broker.workers or broker.draining:
        return _failed(Unavailable("no worker is ready"))
    return Response(b'{"status":"ok"}', media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the job API's routes, with the body that all errors have."""
    path = request.url.path[:200]
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return _failed(MethodNotAllowed(f"{path} takes {allow}, not {request.method}", allow=allow))
    return _failed(RouteNotFound(f"unknown URL: {request.method} {path}"))


async def _worker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WorkerError)
    return _failed(error)


async def _bug(request: Request, error: Exception) -> Response:
    return _failed(InternalError("the server failed to answer this request"))


def _failed(error: WorkerError) -> Response:
    failure = Failure.of(error)
    return Response(failure.body(), failure.status, failure.headers(), media_type="application/json")
