"""What a template takes, found by rendering small conversations and looking at what comes out.

Reading a template's source says little (it may take a list and print Python's repr of it); rendering it says all.
Knows the OpenAI form of messages; knows nothing of models or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from templates import call_abilities
from templates.call_abilities import OTHER, QUESTION, TOOL, WORD, Attempt, CallForm
from templates.conversation import Abilities, Messages
from templates.environment import Program
from templates.rendered import TemplateError

# render(messages, tools) -> text; raises TemplateError
Render = Callable[[Messages, list[dict[str, Any]] | None], str]


def find_abilities(source: str, program: Program, render: Render) -> Abilities:
    def attempt(messages: Messages, tools: list[dict[str, Any]] | None = None) -> str | None:
        try:
            return render(messages, [] if tools is None and needs_tools else tools)
        except TemplateError:
            return None

    needs_tools = False
    needs_tools = attempt([QUESTION]) is None and attempt([QUESTION], []) is not None

    form = call_abilities.find_form(program, "None" in source, attempt)
    part_roles, only_parts = set(), set()
    for role in ("system", "user", "assistant", "tool"):
        as_text = _content(attempt, role, WORD, form)
        as_parts = _content(attempt, role, [{"type": "text", "text": WORD}], form)
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
        no_content=form.no_content,
        arguments=form.arguments,
        ids=call_abilities.id_form(form, attempt),
        many_calls=call_abilities.many_calls(form, attempt),
        hidden_calls=call_abilities.hidden_calls(form, attempt),
    )


def _conversation(role: str, content: Any, form: CallForm) -> Messages:
    if role == "user":
        return [{"role": "user", "content": content}]
    if role == "system":
        return [{"role": "system", "content": content}, QUESTION]
    if role == "assistant":
        return [QUESTION, {"role": "assistant", "content": content}, QUESTION]
    return [QUESTION, *form.round("", result=content)]  # the word must come from the result, not from the call


def _content(attempt: Attempt, role: str, content: Any, form: CallForm) -> bool:
    """Whether the template writes this content as its text."""
    messages = _conversation(role, content, form)
    tools = [TOOL] if role == "tool" else None
    out = attempt(messages, tools)
    if out is None and tools:
        out = attempt(messages)
    return out is not None and WORD in out and (isinstance(content, str) or not _shows_part(out))


def _shows_part(out: str) -> bool:
    """Whether the part came out as data, not as its text. Results of tools may be shown as JSON on purpose."""
    return any(mark in out for mark in ("'type'", "'text'", '"type": "text"', '"type":"text"'))


def _developer(attempt: Attempt, only_parts: set[str]) -> bool:
    """Whether the template writes what a developer says; some name the role and pass over it."""
    content = [{"type": "text", "text": WORD}] if "system" in only_parts else WORD
    out = attempt([{"role": "developer", "content": content}, QUESTION])
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
