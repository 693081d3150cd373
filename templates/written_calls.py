"""Tool calls that a template passes over.

Some templates write an assistant's calls only where the request has tools, only one to a turn, only without content,
or never, while they write the tool's result. Then the calls are written as text into the turn, or the turn is taken
apart. Whether a template does is found out by trying (`templates.abilities`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from templates.call_ids import answered, rounds
from templates.conversation import Messages
from templates.rendered import CallWriter


def fold(message: Mapping[str, Any], write: CallWriter, *, as_parts: bool) -> dict[str, Any]:
    """The turn with its calls as text in the content. `as_parts`: the content must be a list."""
    calls = [(call["function"]["name"], call["function"].get("arguments") or {}) for call in message["tool_calls"]]
    written = write(calls)
    content = message.get("content") or ""
    if isinstance(content, list) or as_parts:
        content = [*(content or []), {"type": "text", "text": written}]
    else:
        content += ("\n" if content and not content.endswith("\n") else "") + written
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


def one_by_one(messages: Messages) -> Messages:
    """Turns of several calls as turns of one, each followed by its result."""
    single: Messages = []
    for message, results in rounds(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            single += [message, *results]
            continue
        answers: dict[int | None, Messages] = {}
        for place, result in zip(answered(calls, results), results, strict=True):
            answers.setdefault(place, []).append(result)
        for place, call in enumerate(calls):
            turn = message if place == 0 else {"role": message["role"]}
            single += [{**turn, "tool_calls": [call]}, *answers.get(place, ())]
        single += answers.get(None, ())
    return single
