"""The chunks of a streamed answer, as plain dicts in the order of the protocol.

    chat:        role (once a choice) -> content / reasoning / tool calls ... -> finish -> usage
    completions: text ... -> finish (on the last text) -> usage

All chunks of a stream share the head's id, created and model. `usage` is null on every chunk but the last where
the client asked for it, running totals where it asked for those, and absent otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.protocol.responses import FinishReason, Head, Usage, chat_logprobs


@dataclass(frozen=True, slots=True)
class Chunks:
    """Builds the chunks of one stream."""

    head: Head
    object: str = "chat.completion.chunk"  # or "text_completion"
    include_usage: bool = False

    def chunk(self, *choices: dict[str, Any], usage: Usage | None = None, **extra: Any) -> dict[str, Any]:
        """A chunk of these choices. `usage` is for continuous_usage_stats; `extra`: prompt_token_ids, prompt_text."""
        chunk: dict[str, Any] = {
            "id": self.head.id,
            "object": self.object,
            "created": self.head.created,
            "model": self.head.model,
            "choices": choices,
            "system_fingerprint": self.head.system_fingerprint,
        }
        if self.include_usage:
            chunk["usage"] = None if usage is None else usage.body()
        for key, value in extra.items():
            if value is not None:
                chunk[key] = value
        return chunk

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last chunk: no choices, only usage."""
        return self.chunk() | {"usage": usage.body()}


def delta_choice(
    index: int,
    delta: dict[str, Any],
    finish_reason: FinishReason | None = None,
    *,
    logprobs: list[dict[str, Any]] | None = None,
    stop_reason: int | str | None = None,
    token_ids: list[int] | None = None,
) -> dict[str, Any]:
    """A chat chunk's choice. `stop_reason` only stands beside a finish_reason."""
    choice: dict[str, Any] = {
        "index": index,
        "delta": delta,
        "logprobs": chat_logprobs(logprobs),
        "finish_reason": finish_reason,
    }
    if finish_reason is not None:
        choice["stop_reason"] = stop_reason
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return choice


def role_delta(role: str = "assistant", content: str | None = "") -> dict[str, Any]:
    """`content` is None where no text comes first: the answer may be calls alone, whose content is null."""
    return {"role": role, "content": content, "refusal": None}


def content_delta(text: str) -> dict[str, Any]:
    return {"content": text}


def reasoning_delta(text: str) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}


def tool_call_delta(index: int, call_id: str, name: str) -> dict[str, Any]:
    """The start of a call; its arguments follow."""
    function = {"name": name, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}


def tool_arguments_delta(index: int, fragment: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}


def function_call_delta(name: str | None = None, fragment: str = "") -> dict[str, Any]:
    """The legacy dialect: the name once, then fragments of the arguments."""
    return {"function_call": {"name": name, "arguments": fragment} if name is not None else {"arguments": fragment}}
