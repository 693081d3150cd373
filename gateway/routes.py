"""The routes that become jobs with `openai_route`. What they mean is the worker's business.

Each is answered at three places: /v2/local/openai/v1/... (as on the platform), /v1/... (what most clients are set to)
and, for old clients and for tools that expect them there, at the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker.errors import MethodNotAllowed, RouteNotFound

PREFIXES = ("/v2/local/openai/v1", "/v1", "")
JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Route:
    name: str  # what the worker gets as openai_route
    method: Literal["GET", "POST"]
    media_type: str = JSON  # of an answer that is plain text
    streams: bool = False  # whether it takes "stream": true

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


_ROUTES = {
    "/chat/completions": Route("/v1/chat/completions", "POST", streams=True),
    "/completions": Route("/v1/completions", "POST", streams=True),
    "/chat/completions/render": Route("/v1/chat/completions/render", "POST"),
    "/completions/render": Route("/v1/completions/render", "POST"),
    "/models": Route("/v1/models", "GET"),
    "/tokenize": Route("/tokenize", "POST"),
    "/detokenize": Route("/detokenize", "POST"),
    "/tokenizer_info": Route("/tokenizer_info", "GET"),
    "/health": Route("/health", "GET"),  # of the worker; at the root it is the gateway's own
    "/version": Route("/version", "GET"),
    "/load": Route("/load", "GET"),
    "/metrics": Route("/metrics", "GET", PROMETHEUS),
    "/reset_prefix_cache": Route("/reset_prefix_cache", "POST"),
}


def find(method: str, path: str) -> Route:
    """The route of a request. Raises RouteNotFound or MethodNotAllowed."""
    route = _lookup(path)
    if route is None:
        raise RouteNotFound(f"unknown URL: {method} {path[:200]}")
    if method not in route.methods:
        allow = ", ".join(route.methods)
        raise MethodNotAllowed(f"{path[:200]} takes {allow}, not {method}", allow=allow)
    return route


def _lookup(path: str) -> Route | None:
    for prefix in PREFIXES:
        if path.startswith(prefix + "/"):
            rest = path[len(prefix) :].rstrip("/")
            if rest in _ROUTES:
                return _ROUTES[rest]
            if rest.startswith("/models/"):  # the names of models contain slashes
                return Route("/v1" + rest, "GET")
    return None
