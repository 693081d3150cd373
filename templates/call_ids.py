"""Ids of tool calls, and which result answers which call.

Clients leave ids out, or bring ids in a form that a template refuses. Here calls and their results get ids that the
template takes: the same on both sides, and the same for the same conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from templates.conversation import IdForm, Messages

RESULT_ROLES = ("tool", "function", "ipython")


def rounds(messages: Messages) -> Iterator[tuple[dict[str, Any], Messages]]:
    """Each message with the results that follow it: none but behind tool calls. Other results come as messages."""
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        results: Messages = []
        while message.get("tool_calls") and position < len(messages) and _is_result(messages[position]):
            results.append(messages[position])
            position += 1
        yield message, results


def answered(calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """For each result the place of its call: the one of its id; where either has none, the first that is left."""
    places: list[int | None] = [None] * len(results)
    left = list(range(len(calls)))
    for number, result in enumerate(results):
        wanted = result.get("tool_call_id")
        places[number] = next((place for place in left if wanted and calls[place].get("id") == wanted), None)
        if (place := places[number]) is not None:
            left.remove(place)
    for number, result in enumerate(results):
        if places[number] is None:
            places[number] = next(
                (place for place in left if not (result.get("tool_call_id") and calls[place].get("id"))), None
            )
            if (place := places[number]) is not None:
                left.remove(place)
    return places


def complete(messages: Messages, form: IdForm) -> Messages:
    """A copy of the messages with ids in this form at every call and every result."""
    if form == "given":
        return messages
    used = {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
    fresh = (name for number in count() if (name := f"call_{number}") not in used)
    completed: Messages = []
    for message, results in rounds(messages):
        if not message.get("tool_calls"):
            given = message.get("tool_call_id") or (next(fresh) if _is_result(message) else None)
            completed.append(_result(message, given, form) if given else message)
            continue
        calls = message["tool_calls"]
        places = answered(calls, results)
        brought = {place: results[number].get("tool_call_id") for number, place in enumerate(places)}
        ids = [
            call.get("id") or brought.get(place) or _made(call, place, form, fresh) for place, call in enumerate(calls)
        ]
        new = [{**call, "id": _formed(ids[place], form)} for place, call in enumerate(calls)]
        completed.append({**message, "tool_calls": new})
        for result, place in zip(results, places, strict=True):
            given = result.get("tool_call_id") if place is None else ids[place]
            completed.append(_result(result, given or next(fresh), form))
    return completed


def _is_result(message: Mapping[str, Any]) -> bool:
    return message.get("role") in RESULT_ROLES


def _result(message: dict[str, Any], given: str, form: IdForm) -> dict[str, Any]:
    return {**message, "tool_call_id": _formed(given, form)}


def _made(call: Mapping[str, Any], place: int, form: IdForm, fresh: Iterator[str]) -> str:
    return f"functions.{call['function']['name']}:{place}" if form == "numbered" else next(fresh)


def _formed(identifier: str, form: IdForm) -> str:
    if form != "nine" or (len(identifier) == 9 and identifier.isalnum() and identifier.isascii()):
        return identifier
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).hexdigest()[:9]
