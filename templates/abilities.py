"""What a template takes, found by rendering small conversations and looking at what comes out.

Reading a template's source says little (it may take a list and print Python's repr of it); rendering it says all.
Knows the OpenAI form of messages; knows nothing of models or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

from templates.conversation import Abilities, Messages
from templates.environment import Program
from templates.rendered import TemplateError

# render(messages, tools) -> text; raises TemplateError
Render = Callable[[Messages, list[dict[str, Any]] | None], str]

WORD = "Wortprobe"  # words that no template contains
OTHER = "Gegenprobe"
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


def find_abilities(source: str, program: Program, render: Render) -> Abilities:
    def attempt(messages: Messages, tools: list[dict[str, Any]] | None = None) -> str | None:
        try:
            return render(messages, [] if tools is None and needs_tools else tools)
        except TemplateError:
            return None

    needs_tools = False
    hello = [{"role": "user", "content": OTHER}]
    needs_tools = attempt(hello) is None and attempt(hello, []) is not None

    arguments, no_content, short_ids = _tool_turns(program, "None" in source, attempt)
    part_roles, only_parts = set(), set()
    for role in ("system", "user", "assistant", "tool"):
        as_text = _content(attempt, role, WORD, no_content, arguments, short_ids)
        as_parts = _content(attempt, role, [{"type": "text", "text": WORD}], no_content, arguments, short_ids)
        if as_parts:
            part_roles.add(role)
            if not as_text:
                only_parts.add(role)
        shows_results = as_text or as_parts  # of the last role
    return Abilities(
        tools=bool({"tools", "functions"} & program.variables),
        tool_turns=shows_results or "tool_calls" in source,
        needs_tools=needs_tools,
        developer="developer" in source and _developer(attempt, only_parts),
        many_systems=_many_systems(attempt, only_parts),
        part_roles=frozenset(part_roles),
        only_parts_roles=frozenset(only_parts),
        no_content=no_content,
        arguments=arguments,
        short_ids=short_ids,
    )


Attempt = Callable[..., "str | None"]


def _conversation(role: str, content: Any, no_content: str, arguments: str, short_ids: bool) -> Messages:
    user = {"role": "user", "content": OTHER}
    if role == "user":
        return [{"role": "user", "content": content}]
    if role == "system":
        return [{"role": "system", "content": content}, user]
    if role == "assistant":
        return [user, {"role": "assistant", "content": content}, user]
    return [user, *_call_and_result(content, no_content, arguments, short_ids)]


def _call_and_result(result: Any, no_content: str, arguments: str, short_ids: bool) -> Messages:
    call_id = "call12345" if short_ids else "call_1234567890"
    values: Any = {"probe_argument": WORD}
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "probe_tool", "arguments": values if arguments == "object" else json.dumps(values)},
    }
    assistant: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if no_content != "missing":
        assistant["content"] = None if no_content == "null" else ""
    return [assistant, {"role": "tool", "name": "probe_tool", "tool_call_id": call_id, "content": result}]


def _content(attempt: Attempt, role: str, content: Any, no_content: str, arguments: str, short_ids: bool) -> bool:
    """Whether the template writes this content as its text."""
    messages = _conversation(role, content, no_content, arguments, short_ids)
    tools = [TOOL] if role == "tool" else None
    if role == "tool":  # the word must come from the result, not from the call
        messages[1]["tool_calls"][0]["function"]["arguments"] = {} if arguments == "object" else "{}"
    out = attempt(messages, tools)
    if out is None and tools:
        out = attempt(messages)
    return out is not None and WORD in out and (isinstance(content, str) or not _shows_part(out))


def _shows_part(out: str) -> bool:
    """Whether the part came out as data, not as its text. Results of tools may be shown as JSON on purpose."""
    return any(mark in out for mark in ("'type'", "'text'", '"type": "text"', '"type":"text"'))


def _tool_turns(program: Program, says_none: bool, attempt: Attempt) -> tuple[Any, Any, bool]:
    """(arguments, no_content, short_ids) with which a tool call and its result render; the usual form if none does."""
    preferred = ("null", "missing", "empty") if program.asks_for_null else ("missing", "empty", "null")
    for short_ids, arguments, no_content in product((False, True), ("object", "text"), preferred):
        user = {"role": "user", "content": OTHER}
        messages = [user, *_call_and_result("result", no_content, arguments, short_ids)]
        out = attempt(messages, [TOOL])
        if out is None:
            out = attempt(messages)
        if out is None or "{'probe_argument'" in out or ("None" in out and not says_none):
            continue
        if arguments == "text" and '\\"probe_argument' in out:
            continue  # JSON in JSON
        return arguments, no_content, short_ids
    return "object", preferred[0], False


def _developer(attempt: Attempt, only_parts: set[str]) -> bool:
    """Whether the template writes what a developer says; some name the role and pass over it."""
    content = [{"type": "text", "text": WORD}] if "system" in only_parts else WORD
    out = attempt([{"role": "developer", "content": content}, *_conversation("user", OTHER, "", "", False)])
    return out is not None and WORD in out


def _many_systems(attempt: Attempt, only_parts: set[str]) -> bool:
    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if role in only_parts else text}

    first, second = message("system", WORD), message("system", OTHER)
    user, assistant = message("user", "question"), message("assistant", "answer")
    for messages in ([first, second, user], [first, user, assistant, second, user]):
        out = attempt(messages)
        if out is None or WORD not in out or OTHER not in out:
            return False
    return True
