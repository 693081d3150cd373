"""Messages as one template can take them.

A request's messages come in the OpenAI form. Templates differ in what they accept: content as text or as parts,
arguments of tool calls as an object or as JSON text, system messages anywhere or only in front ... `Abilities` says
what a template takes (`templates.abilities` finds out by trying), `adapt` brings messages into that form and changes
nothing that the template takes as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from templates.rendered import TemplateError

Messages = list[dict[str, Any]]
SYSTEM_ROLES = ("system", "developer")
NOT_LAST = "continue_final_message: the last message is a system message, which this chat format puts in front"
# What a template asks of the ids of calls. given: nothing. any: that there is one. nine: 9 letters and digits.
# named: it writes them in place of names, as functions.NAME:0. numbered: it writes such ids itself, at the first call
# of a turn with 0, and results with the ids that they have.
IdForm = Literal["given", "any", "nine", "named", "numbered"]
Arguments = Literal["object", "text"]  # of a call
NoContent = Literal["missing", "null", "empty"]  # how a turn that only calls tools says nothing
Beside = Literal["nothing", "empty", "text"]  # the content of a turn with calls: none, "", or words
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read


@dataclass(frozen=True)
class Abilities:
    """What a template takes."""

    tools: bool = True  # it writes the tools of a request
    tool_turns: bool = True  # it writes turns in which tools were called or answered
    needs_tools: bool = False  # it fails where tools are null; an empty list is fine
    developer: bool = False  # it has the role "developer"
    many_systems: bool = True  # system messages anywhere, more than one
    part_roles: frozenset[str] = frozenset()  # roles whose content may be a list of parts
    only_parts_roles: frozenset[str] = frozenset()  # roles whose content must be a list of parts
    no_content: NoContent = "missing"
    arguments: Arguments = "object"
    ids: IdForm = "given"
    many_calls: bool = True  # it writes all calls of a turn
    # Turns whose calls it passes over: whether the request has tools, and what is beside the calls.
    hidden_calls: frozenset[tuple[bool, Beside]] = frozenset()

    def hides_calls(self, message: Mapping[str, Any], tools: bool) -> bool:
        return bool(message.get("tool_calls")) and (tools, _beside(message)) in self.hidden_calls


def adapt(messages: Messages, abilities: Abilities, tools: bool = False) -> Messages:
    """A copy of the messages in the form that the template takes. `tools`: whether the request has any."""
    adapted = [_message(message, abilities, tools) for message in messages]
    if not abilities.many_systems:
        adapted = _one_system(adapted)
    return adapted


def _message(message: Mapping[str, Any], abilities: Abilities, tools: bool) -> dict[str, Any]:
    new = {key: value for key, value in message.items() if value is not None}
    if new.get("role") == "developer" and not abilities.developer:
        new["role"] = "system"
    role = str(new.get("role", ""))
    if not new.get("tool_calls", True):
        del new["tool_calls"]
    reasoning = next((new[key] for key in REASONING_KEYS if key in new), None)
    if reasoning is not None:
        new = {"thinking": reasoning, **new, "reasoning_content": reasoning}
    if not new.get("content") and abilities.hides_calls(new, tools):
        bare = {key: value for key, value in new.items() if key != "content"}
        new = new if abilities.hides_calls(bare, tools) else bare
    if "content" in new:
        new["content"] = _content(new["content"], role, abilities)
    elif role != "assistant" or abilities.no_content == "empty":
        new["content"] = ""
    elif abilities.no_content == "null":
        new["content"] = None
    if isinstance(new.get("tool_calls"), list):
        form: Arguments = "object" if abilities.hides_calls(new, tools) else abilities.arguments
        new["tool_calls"] = [_tool_call(call, form) for call in new["tool_calls"]]
    return new


def _beside(message: Mapping[str, Any]) -> Beside:
    content = message.get("content")
    return "nothing" if content is None else "text" if content else "empty"


def _content(content: Any, role: str, abilities: Abilities) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if role in abilities.only_parts_roles else content
    if not isinstance(content, list):
        raise TemplateError("content must be a string or a list of parts")
    for part in content:
        if not isinstance(part, str) and not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(f"content parts of type {kind!r} are not supported: this model takes text")
    texts = [part if isinstance(part, str) else part["text"] for part in content]
    if role in abilities.part_roles:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _tool_call(call: Mapping[str, Any], form: Arguments) -> dict[str, Any]:
    new = {key: value for key, value in call.items() if value is not None}
    if isinstance(new.get("function"), Mapping):
        function = dict(new["function"])
        function["arguments"] = _arguments(function.get("arguments"), form)
        new["function"] = function
    return new


def _arguments(arguments: Any, form: Arguments) -> Any:
    """Text that is no JSON object stays as it is: an answer may have been broken, and the model should see it."""
    if arguments is None or arguments == "":
        arguments = {}
    if form == "text":
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    parsed = parse_object(arguments) if isinstance(arguments, str) else arguments
    return arguments if parsed is None else parsed


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def broken_arguments(messages: Messages) -> str | None:
    """The path of the first tool call whose arguments are no JSON object."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or []):
            arguments = (call.get("function") or {}).get("arguments")
            if isinstance(arguments, str) and arguments and parse_object(arguments) is None:
                return f"messages[{index}].tool_calls[{number}].function.arguments"
    return None


def _one_system(messages: Messages) -> Messages:
    """All system messages as one in front."""
    systems = [message for message in messages if message.get("role") == "system"]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return messages
    contents = [message["content"] for message in systems]
    if any(isinstance(content, list) for content in contents):
        merged: Any = [
            part
            for content in contents
            for part in (content if isinstance(content, list) else [{"type": "text", "text": content}])
        ]
    else:
        merged = "\n\n".join(content for content in contents if content)
    return [{**systems[0], "content": merged}, *(m for m in messages if m.get("role") != "system")]
