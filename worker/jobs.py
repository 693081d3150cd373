"""job["input"] in every accepted shape -> one Operation. Pure: no settings, no clock, no engine.

    {"openai_route": "/v1/chat/completions", "openai_input": {...}}     what the platform makes of an HTTP request
    {"openai_input": {...}}                                             the same, for chat
    {"openai_route": "/v1/models"}                                      a GET
    {"route": "/v1/...", "method": "POST", "body": {...}}               any route by name
    {"messages" | "prompt": ..., "stream": bool, "sampling_params": {...}, <any request field>}

The last is the shape of older workers. Its fields and those of `sampling_params` make one request body (the latter
win; unknown ones among the latter are refused), answered in OpenAI's shape. An input that uses one of the knobs only
the oldest workers had (apply_chat_template, use_openai_format, min_batch_size, max_batch_size,
batch_size_growth_factor) is answered in the shape those had, {"choices": [{"tokens": [...]}], "usage": {"input",
"output"}}, with their default of 100 tokens; "use_openai_format": true asks for OpenAI's shape instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

from worker.errors import BadRequest, MethodNotAllowed, RouteNotFound
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest
from worker.protocol.validation import check_json, fail, kind, quote

Kind = Literal[
    "chat", "completions", "models", "model", "tokenize", "detokenize", "render", "render_completions",
    "health", "metrics", "version", "load", "tokenizer_info", "reset_prefix_cache",
]  # fmt: skip

_ROUTES: dict[str, tuple[Literal["GET", "POST"], Kind]] = {
    "/chat/completions": ("POST", "chat"),
    "/completions": ("POST", "completions"),
    "/chat/completions/render": ("POST", "render"),
    "/completions/render": ("POST", "render_completions"),
    "/tokenize": ("POST", "tokenize"),
    "/detokenize": ("POST", "detokenize"),
    "/reset_prefix_cache": ("POST", "reset_prefix_cache"),
    "/models": ("GET", "models"),
    "/health": ("GET", "health"),
    "/ping": ("GET", "health"),
    "/metrics": ("GET", "metrics"),
    "/version": ("GET", "version"),
    "/load": ("GET", "load"),
    "/tokenizer_info": ("GET", "tokenizer_info"),
}
# The routes whose POST may come without a body.
_BODILESS: frozenset[Kind] = frozenset({"reset_prefix_cache"})

SHAPES = (
    'the job input must be one of {"openai_route", "openai_input"}, {"route", "method", "body"}, '
    '{"messages", "sampling_params"} or {"prompt", "sampling_params"}'
)
_KNOBS = ("apply_chat_template", "use_openai_format", "min_batch_size", "max_batch_size", "batch_size_growth_factor")
NATIVE_MAX_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Native:
    """The oldest workers' answer: how many text deltas a yield carries. None = the server's settings."""

    min_batch_size: int | None = None
    max_batch_size: int | None = None
    batch_size_growth_factor: float | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    kind: Kind
    body: dict[str, Any] = field(default_factory=dict)
    model_id: str | None = None  # of GET /v1/models/{id}
    native: Native | None = None

    @property
    def stream(self) -> bool:
        return self.kind in ("chat", "completions") and self.body.get("stream") is True


def parse(job_input: Any) -> Operation:
    """The operation a job asks for; raises WorkerError."""
    if not isinstance(job_input, dict):
        raise BadRequest(f"{SHAPES}; got {kind(job_input)}", param="input", code="invalid_type")
    if job_input.get("openai_route") is not None or job_input.get("openai_input") is not None:
        return _routed(job_input, "openai_route", "openai_input", default_route="/v1/chat/completions")
    if job_input.get("route") is not None:
        return _routed(job_input, "route", "body")
    if job_input.get("messages") is not None or job_input.get("prompt") is not None:
        return _plain(job_input)
    given = ", ".join(quote(key) for key in list(job_input)[:5]) or "nothing"
    raise BadRequest(f"{SHAPES}; got {given}", param="input", code="missing_required_parameter")


def _routed(job_input: dict[str, Any], route_key: str, body_key: str, default_route: str = "") -> Operation:
    route, body, method = job_input.get(route_key), job_input.get(body_key), job_input.get("method")
    if route is None:
        route = default_route
    if not isinstance(route, str):
        fail(route_key, f"must be a string, got {kind(route)}", "invalid_type")
    if method is not None and not isinstance(method, str):
        fail("method", f"must be a string, got {kind(method)}", "invalid_type")
    expected, operation, model_id = _route(route)
    # A POST without meaning is how some callers ask for everything.
    if method is not None and method.upper() not in (expected, "POST"):
        text = f"{route_key} {quote(route)} takes {expected}, not {quote(method)}"
        raise MethodNotAllowed(text, allow=expected, param="method")
    if expected == "GET":
        return Operation(operation, model_id=model_id)
    if body is None and operation not in _BODILESS:
        fail(body_key, f"is required: {quote(route)} takes a JSON body", "missing_required_parameter")
    if body is not None and not isinstance(body, dict):
        fail(body_key, f"must be an object, got {kind(body)}", "invalid_type")
    return Operation(operation, body or {})


def _route(route: str) -> tuple[str, Kind, str | None]:
    """(method, kind, model id) of a route, with or without /v1 and slashes at its end."""
    path = "/" + route.split("?", 1)[0].strip("/")
    for prefix in ("/openai", "/v1"):
        if path.startswith(prefix + "/"):
            path = path[len(prefix) :]
    if path in _ROUTES:
        return *_ROUTES[path], None
    if path.startswith("/models/"):
        return "GET", "model", unquote(path.removeprefix("/models/"))
    raise RouteNotFound(f"unknown route {quote(route)}; known are {', '.join(_ROUTES)}", param="openai_route")


def _plain(job_input: dict[str, Any]) -> Operation:
    """Fields of a request beside sampling_params."""
    params = job_input.get("sampling_params")
    if params is None:
        params = {}
    if not isinstance(params, dict):
        fail("sampling_params", f"must be an object, got {kind(params)}", "invalid_type")
    check_json(params)  # the rest is checked with the request that is made of it
    body = {key: value for key, value in job_input.items() if key not in _KNOBS and key != "sampling_params"}
    messages = _as_messages(job_input)
    operation: Kind = "completions" if messages is None else "chat"
    if messages is not None:
        body.pop("prompt", None)
        body["messages"] = messages
    _merge(body, params, operation)
    native = _native(job_input)
    if native is not None and body.get("max_tokens") is None:
        body["max_tokens"] = NATIVE_MAX_TOKENS
    return Operation(operation, body, native=native)


def _as_messages(job_input: dict[str, Any]) -> Any:
    """The messages, or None where the prompt is raw text. messages win over prompt."""
    if job_input.get("messages") is not None:
        return job_input["messages"]
    prompt, templated = job_input["prompt"], job_input.get("apply_chat_template")
    if templated is not None and not isinstance(templated, bool):
        fail("apply_chat_template", f"must be a boolean, got {kind(templated)}", "invalid_type")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return prompt
    return prompt if templated and isinstance(prompt, str) else None


def _merge(body: dict[str, Any], params: dict[str, Any], operation: Kind) -> None:
    request = ChatCompletionRequest if operation == "chat" else CompletionRequest
    params = dict(params)
    if isinstance(params.get("guided_decoding"), dict):
        params["structured_outputs"] = params.pop("guided_decoding")
    count = params.get("logprobs")
    if operation == "chat" and isinstance(count, int) and not isinstance(count, bool):
        params |= {"logprobs": True, "top_logprobs": count}
    for name, value in params.items():
        if name not in request.model_fields:
            fail(f"sampling_params.{name[:64]}", "is not a sampling parameter", "unknown_parameter")
        if value is not None:
            body[name] = value


def _native(job_input: dict[str, Any]) -> Native | None:
    given = {name: job_input[name] for name in _KNOBS if job_input.get(name) is not None}
    if not given:
        return None
    for name in ("apply_chat_template", "use_openai_format"):
        if not isinstance(given.pop(name, False), bool):
            fail(name, f"must be a boolean, got {kind(job_input[name])}", "invalid_type")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 10_000:
            fail(name, f"must be a number in [1, 10000], got {quote(value)}")
        if name != "batch_size_growth_factor" and value != int(value):
            fail(name, f"must be an integer, got {quote(value)}", "invalid_type")
    if job_input.get("use_openai_format") is True:
        return None
    sizes = {name: int(given[name]) for name in ("min_batch_size", "max_batch_size") if name in given}
    return Native(**sizes, batch_size_growth_factor=given.get("batch_size_growth_factor"))
