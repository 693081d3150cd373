"""Whole answers in OpenAI's shapes, as plain dicts: chat completions, completions, usage, logprobs, models.

Fields beyond OpenAI's (stop_reason, reasoning, token_ids, prompt_logprobs, ...) are those of vLLM, present only
where asked for, but stop_reason and reasoning. `reasoning` and `reasoning_content` carry the same text: clients
are split over the name.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

# What stands for minus infinity where a client expects a number.
MIN_LOGPROB = -9999.0
OWNER = "worker-paged"

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer and all its chunks share."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None

    @classmethod
    def chat(cls, model: str, request_id: str | None = None, system_fingerprint: str | None = None) -> Head:
        return cls(f"chatcmpl-{request_id or new_id()}", int(time.time()), model, system_fingerprint)

    @classmethod
    def completion(cls, model: str, request_id: str | None = None, system_fingerprint: str | None = None) -> Head:
        return cls(f"cmpl-{request_id or new_id()}", int(time.time()), model, system_fingerprint)


def new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0  # summed over choices
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def chat_completion(head: Head, choices: list[dict[str, Any]], usage: Usage, **extra: Any) -> dict[str, Any]:
    """`extra`: prompt_token_ids, prompt_text, prompt_logprobs; None is left out."""
    return _answer(head, "chat.completion", choices, usage, extra)


def completion(head: Head, choices: list[dict[str, Any]], usage: Usage, **extra: Any) -> dict[str, Any]:
    return _answer(head, "text_completion", choices, usage, extra)


def _answer(head: Head, object_: str, choices: list[Any], usage: Usage, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": object_,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage.body(),
        "system_fingerprint": head.system_fingerprint,
        **_given(extra),
    }


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def chat_message(
    content: str | None,
    *,
    role: str = "assistant",
    reasoning: str | None = None,
    tool_calls: list[dict[str, Any]] | None = None,
    function_call: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """An assistant's message. `content` is None where there is only a call or only reasoning."""
    message: dict[str, Any] = {"role": role, "content": content, "refusal": None}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if tool_calls:
        message["tool_calls"] = tool_calls
    if function_call:
        message["function_call"] = function_call
    return message


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_choice(
    index: int,
    message: dict[str, Any],
    finish_reason: FinishReason,
    *,
    logprobs: list[dict[str, Any]] | None = None,
    stop_reason: int | str | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """`logprobs`: entries of `token_logprob`, or None. `extra`: token_ids."""
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(logprobs),
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        **_given(extra),
    }


def completion_choice(
    index: int,
    text: str,
    finish_reason: FinishReason | None,
    *,
    logprobs: dict[str, Any] | None = None,
    stop_reason: int | str | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """The same shape serves whole answers and chunks. `logprobs`: {tokens, token_logprobs, top_logprobs, text_offset}.
    `extra`: token_ids, prompt_token_ids, prompt_logprobs, prompt_text."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        **_given(extra),
    }


def finite(logprob: float) -> float:
    """`logprob` as JSON can carry it; also turns the NaN of a fully masked row into the smallest value."""
    return logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB


def token_logprob(
    token: str, logprob: float, token_bytes: bytes, top: list[tuple[str, float, bytes]]
) -> dict[str, Any]:
    """One position of chat's `logprobs.content`; `top` in descending order."""
    return {
        "token": token,
        "logprob": finite(logprob),
        "bytes": list(token_bytes),
        "top_logprobs": [{"token": text, "logprob": finite(value), "bytes": list(raw)} for text, value, raw in top],
    }


def chat_logprobs(content: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    return None if content is None else {"content": content, "refusal": None}


def model_card(
    model_id: str, *, created: int, root: str, max_model_len: int, parent: str | None = None
) -> dict[str, Any]:
    """One entry of /v1/models. `root` is the model's own name, never a path."""
    return {
        "id": model_id,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


def model_list(cards: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": cards}
