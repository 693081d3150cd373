"""Ids of tool calls, and which result answers which call.

Clients leave ids out, or bring ids in a form that a template refuses. Here calls and their results get ids that the
template takes: the same on both sides, and the same for the same conversation.
"""

from __future__ import annotations

import hashlib
import re
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
    by_id: dict[str, list[int]] = {}
    for place in reversed(range(len(calls))):
        by_id.setdefault(calls[place].get("id") or "", []).append(place)
    places = [by_id[wanted].pop() if (wanted := _wanted(result)) and by_id.get(wanted) else None for result in results]
    taken = set(places)
    left = (place for place in range(len(calls)) if place not in taken)
    nameless = (place for place in range(len(calls)) if place not in taken and not calls[place].get("id"))
    for number, result in enumerate(results):
        if places[number] is None:
            places[number] = next(nameless if _wanted(result) else left, None)
            taken.add(places[number])
    return places


def complete(messages: Messages, form: IdForm) -> Messages:
    """A copy of the messages with ids in this form at every call and every result."""
    if form == "given":
        return messages
    used = {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
    fresh = (name for number in count() if (name := f"call_{number}") not in used)
    completed: Messages = []
    number = 0  # of the calls so far
    for message, results in rounds(messages):
        calls = message.get("tool_calls") or ()
        places = answered(calls, results)
        brought = {place: results[at].get("tool_call_id") for at, place in enumerate(places)}
        ids = []
        for place, call in enumerate(calls):
            given, name = call.get("id") or brought.get(place), call["function"]["name"]
            if form == "named" and not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", given or ""):
                given = f"functions.{name}:{number + place}"
            elif form == "numbered":
                given = given or f"functions.{name}:{place}"
            ids.append(_formed(given or next(fresh), form))
        number += len(calls)
        if calls:
            message = {**message, "tool_calls": [{**call, "id": new} for call, new in zip(calls, ids, strict=True)]}
        elif _is_result(message):
            message = {**message, "tool_call_id": _formed(message.get("tool_call_id") or next(fresh), form)}
        completed.append(message)
        for result, of in zip(results, places, strict=True):
            new = _formed(result.get("tool_call_id") or next(fresh), form) if of is None else ids[of]
            completed.append({**result, "tool_call_id": new})
    return completed


def _wanted(result: Mapping[str, Any]) -> str:
    return result.get("tool_call_id") or ""


def _is_result(message: Mapping[str, Any]) -> bool:
    return message.get("role") in RESULT_ROLES


def _formed(identifier: str, form: IdForm) -> str:
    if form != "nine" or (len(identifier) == 9 and identifier.isalnum() and identifier.isascii()):
        return identifier
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).hexdigest()[:9]
