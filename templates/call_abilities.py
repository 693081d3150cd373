"""What a template makes of tool calls and their results, found by rendering small conversations.

Knows the OpenAI form of calls; what else a template takes is `templates.abilities`' business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from templates.conversation import Arguments, Beside, IdForm, Messages, NoContent
from templates.environment import Program
from templates.written_calls import one_by_one

# attempt(messages, tools=None) -> text, or None where the template fails
Attempt = Callable[..., "str | None"]

WORD = "Wortprobe"  # words that no template contains
OTHER = "Gegenprobe"
THIRD = "Zweitprobe"
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_argument": {"type": "string", "description": "A word."}},
            "required": ["probe_argument"],
        },
    },
}
QUESTION = {"role": "user", "content": OTHER}


@dataclass(frozen=True)
class CallForm:
    """A form of turns that call tools."""

    arguments: Arguments = "object"
    no_content: NoContent = "missing"
    short_ids: bool = False

    def call_id(self, number: int) -> str:
        return f"call1234{number}" if self.short_ids else f"call_123456789{number}"

    def round(self, *words: str, result: Any = "result", content: str | None = None, ids: bool = True) -> Messages:
        """A turn with a call for each word, and the results. `content`: beside the calls."""
        calls, results = [], []
        for number, word in enumerate(words):
            values: Any = {"probe_argument": word} if word else {}
            function = {
                "name": "probe_tool" if number == 0 else f"probe_tool_{number}",
                "arguments": values if self.arguments == "object" else json.dumps(values),
            }
            given = self.call_id(number)
            calls.append({"id": given, "type": "function", "function": function})
            results.append({"role": "tool", "name": function["name"], "tool_call_id": given, "content": result})
            if not ids:
                del calls[-1]["id"], results[-1]["tool_call_id"]
        turn: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        if content is not None or self.no_content != "missing":
            turn["content"] = "" if content is None and self.no_content == "empty" else content
        return [turn, *results]


def find_form(program: Program, says_none: bool, attempt: Attempt) -> CallForm:
    """The form in which the template writes a call and its result; if none, one that it takes; if none, the usual."""
    contents: tuple[NoContent, ...] = ("missing", "empty", "null")
    if program.asks_for_null:
        contents = ("null", "missing", "empty")
    kinds: tuple[Arguments, ...] = ("object", "text")
    for short_ids in (False, True):
        taken: CallForm | None = None
        for arguments, no_content in product(kinds, contents):
            form = CallForm(arguments, no_content, short_ids)
            out = _written(attempt, form.round(WORD))
            if out is None or "{'probe_argument'" in out or ("None" in out and not says_none):
                continue
            if arguments == "text" and '\\"probe_argument' in out:
                continue  # JSON in JSON
            if WORD in out:
                return form
            taken = taken or form
        if taken:
            return taken
    return CallForm(no_content=contents[0])


def hidden_calls(form: CallForm, attempt: Attempt) -> frozenset[tuple[bool, Beside]]:
    """As in Abilities. Turns that the template refuses are not among them: that it says itself."""
    contents: dict[Beside, str | None] = {"nothing": None, "empty": "", "text": "Words."}
    hidden: set[tuple[bool, Beside]] = set()
    for tools, (beside, content) in product((False, True), contents.items()):
        out = attempt([QUESTION, *form.round(WORD, content=content)], [TOOL] if tools else None)
        if out is not None and WORD not in out:
            hidden.add((tools, beside))
    return frozenset(hidden)


def many_calls(form: CallForm, attempt: Attempt) -> bool:
    """Whether all calls of a turn are written; also true where it would not help to write them one by one."""
    turns = form.round(WORD, THIRD)
    return _shows(attempt, turns, WORD, THIRD) or not _shows(attempt, one_by_one(turns), WORD, THIRD)


def id_form(form: CallForm, attempt: Attempt) -> IdForm:
    if form.short_ids:
        return "nine"
    if _ids_are_names(form, attempt):
        return "named"
    words: tuple[str, ...] = (WORD, THIRD)
    out, without = (_written(attempt, form.round(*words, ids=ids)) for ids in (True, False))
    if out is None:
        words = (WORD,)
        out, without = (_written(attempt, form.round(*words, ids=ids)) for ids in (True, False))
    if out is None:
        return "given"
    ids = "|".join(form.call_id(number) for number in range(len(words)))
    blank = re.sub(ids, "", out)
    if without is not None and (blank == out or blank != without) and _names(out) == _names(without):
        return "given"
    return "numbered" if "functions.probe_tool:0" in out else "any"


def _ids_are_names(form: CallForm, attempt: Attempt) -> bool:
    turn, result = form.round(WORD)
    del result["name"]
    written = (_written(attempt, [turn, result]) or "").partition(OTHER)[2]
    return form.call_id(0) in written.partition(WORD)[0] and "probe_tool" not in written


def _names(text: str) -> list[str]:
    """Which tools are named in which order: some templates look up a result's name by its id."""
    return re.findall(r"probe_tool(?:_\d)?", text)


def _shows(attempt: Attempt, turns: Messages, *words: str) -> bool:
    out = _written(attempt, turns)
    return out is not None and all(word in out for word in words)


def _written(attempt: Attempt, turns: Messages) -> str | None:
    out = attempt([QUESTION, *turns], [TOOL])
    return attempt([QUESTION, *turns]) if out is None else out
