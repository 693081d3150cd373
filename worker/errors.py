"""Errors that a client sees. Each knows its HTTP status and its OpenAI body.

    WorkerError
    ├── BadRequest           400  invalid_request_error   the request is wrong; `param` names the field
    │   └── ContextLength    400  context_length_exceeded
    ├── Unauthorized         401  invalid_api_key
    ├── ModelNotFound        404  model_not_found
    ├── RouteNotFound        404  unknown_url
    ├── MethodNotAllowed     405  method_not_allowed      `allow` becomes the Allow header
    ├── PayloadTooLarge      413  request_too_large
    ├── RateLimited          429  rate_limit_exceeded     `retry_after_s` becomes the Retry-After header
    ├── InternalError        500  server_error
    └── Unavailable          503  server_error            the engine is gone or not there yet

`SettingsError` is no client's business: it ends the start of the process.
"""

from __future__ import annotations

from typing import Any

# A message may quote what the caller sent; a huge input must not become a huge answer.
MAX_MESSAGE_CHARS = 1000


class SettingsError(ValueError):
    """A setting is wrong. The message names the variable and its value (never a secret's)."""


class WorkerError(Exception):
    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = clip(message)
        self.param = param
        self.code = code if code is not None else type(self).code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The OpenAI error body: {"error": {message, type, param, code}}."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(WorkerError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLength(BadRequest):
    code = "context_length_exceeded"


class Unauthorized(WorkerError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class ModelNotFound(WorkerError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class RouteNotFound(WorkerError):
    status = 404
    type = "invalid_request_error"
    code = "unknown_url"


class MethodNotAllowed(WorkerError):
    """`allow`: the methods that the route takes, as the Allow header names them."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.allow = allow


class PayloadTooLarge(WorkerError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimited(WorkerError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class InternalError(WorkerError):
    status = 500
    type = "server_error"
    code = "server_error"


class Unavailable(WorkerError):
    status = 503
    type = "server_error"
    code = "server_error"


def clip(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """`text` cut to `limit` characters, with lone surrogates replaced so that it can be sent as UTF-8."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"
