"""What happens to every user's request before its route is looked at: host, id, origin, errors, key, pace."""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
import uuid
from collections import deque
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import relay
from gateway.asgi import ClientGone, discard, respond
from gateway.envelope import Failure
from worker.errors import RateLimited, Unauthorized, WorkerError

_HEADER_SAFE = re.compile(r"[\x21-\x7e]{1,128}")
# Open to everybody: the page asks for the key itself, load balancers have none.
_PUBLIC = {"/", "/health", "/ping"}


class ForeignOrigin(WorkerError):
    status = 403
    type = "invalid_request_error"
    code = "origin_not_allowed"


class ForeignHost(WorkerError):
    status = 403
    type = "invalid_request_error"
    code = "host_not_allowed"


class EarlyAnswers:
    """Sends an answer that is there before the request's body has come (too large, no key ...) at once. What still
    comes of the body is thrown away for a while: a connection that is closed under a sender loses the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        missing = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

        async def noting() -> Message:
            nonlocal missing
            message = await receive()
            missing = missing and message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def closing(message: Message) -> None:
            if not missing:
                await send(message)
            elif message["type"] == "http.response.start":
                await send({**message, "headers": [*message["headers"], (b"connection", b"close")]})
            else:
                await send({**message, "more_body": True})
                if not message.get("more_body", False):
                    await discard(noting)
                    await send({"type": "http.response.body", "body": b""})

        await self._app(scope, noting, closing)


class Hosts:
    """Answers only under names of this machine and those of ALLOWED_HOSTS. A web page whose own name is made to lead
    here (DNS rebinding) counts as of the same origin for its browser, but cannot choose the name that it sends."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host")
        if host is None or "*" in self._allowed or is_local(name := host_name(host)) or name in self._allowed:
            await self._app(scope, receive, send)
        else:
            message = "this server is not called by this host name; the setting ALLOWED_HOSTS names those that it is"
            await relay.fail(send, Failure.of(ForeignHost(message, param="Host")))


def host_name(host: str) -> str:
    """The name or address of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def is_local(name: str) -> bool:
    """Whether a name or address always means this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class RequestId:
    """Gives every request an id and every answer the header that names it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        given = Headers(scope=scope).get("x-request-id", "")
        state["request_id"] = given if _HEADER_SAFE.fullmatch(given) else uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and _HEADER_SAFE.fullmatch(state["request_id"]):
                message["headers"] = [*message["headers"], (b"x-request-id", state["request_id"].encode())]
            await send(message)

        await self._app(scope, receive, with_id)


class Errors:
    """Turns an error that was raised instead of an answer into one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except WorkerError as error:
            await relay.fail(send, Failure.of(error))
        except ClientGone:
            pass


class Cors:
    """Lets web pages of the allowed origins in, and keeps those of all others out.

    The playground has the gateway's own origin and needs no permission.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or origin.split("://")[-1] == headers.get("host"):
            await self._app(scope, receive, send)
            return
        if "*" not in self._origins and origin not in self._origins:
            refused = ForeignOrigin("web pages of this origin are not let in; the setting CORS_ORIGINS names who is")
            await relay.fail(send, Failure.of(refused))
            return

        async def with_permission(message: Message) -> None:
            if message["type"] == "http.response.start":
                permission = MutableHeaders(scope=message)
                permission["access-control-allow-origin"] = origin
                permission["access-control-expose-headers"] = "x-request-id, x-ignored-fields, retry-after"
                permission.add_vary_header("origin")
            await send(message)

        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            allowed = {
                "access-control-allow-methods": "GET, POST",
                "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
                "access-control-max-age": "600",
            }
            await respond(with_permission, 204, headers=allowed)
        else:
            await self._app(scope, receive, with_permission)


class ApiKey:
    """Asks for the key, as a bearer token or bare."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in _PUBLIC:
            given = Headers(scope=scope).get("authorization", "").strip()
            scheme, _, rest = given.partition(" ")
            token = rest.strip() if scheme.lower() == "bearer" else given
            if not hmac.compare_digest(token.encode("utf-8", "replace"), self._key):
                said = "You didn't provide an API key." if not token else "Incorrect API key provided."
                raise Unauthorized(f"{said} Send it in the header 'Authorization: Bearer <key>'.")
        await self._app(scope, receive, send)


class RateLimit:
    """At most `limit` POSTs in any 10 seconds, over all clients."""

    WINDOW_S = 10.0

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._times: deque[float] = deque(maxlen=limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            now = time.monotonic()
            if len(self._times) == self._times.maxlen and now - self._times[0] < self.WINDOW_S:
                message = f"more than {self._times.maxlen} requests in {self.WINDOW_S:g} s"
                raise RateLimited(message, retry_after_s=self._times[0] + self.WINDOW_S - now)
            self._times.append(now)
        await self._app(scope, receive, send)


def wrap(app: ASGIApp, *layers: Callable[[ASGIApp], ASGIApp]) -> ASGIApp:
    """`app` inside the layers, the first one outermost."""
    for layer in reversed(layers):
        app = layer(app)
    return app
