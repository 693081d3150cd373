"""In real templates, too, nothing that a user writes becomes a control token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import templates
from templates import ChatTemplates, Piece, TemplateError
from tests.templates_real.families import control_tokens
from tests.unit.template_folders import assistant, system, tool, user

PLAIN = "plain words"


def conversation(evil: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A chat with `evil` in every value that a client can set, tools included."""
    function = {
        "name": evil,
        "description": evil,
        "parameters": {"type": "object", "properties": {evil: {"type": "string", "description": evil}}},
    }
    made = {"name": evil, "arguments": {f"p{evil}": evil}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call12345", "type": "function", "function": made}],
    }
    messages = [system(evil), user(evil), call, tool(evil, "call12345"), assistant("done"), user(evil)]
    return messages, [{"type": "function", "function": function}]


def control(chat: ChatTemplates, evil: str) -> list[str] | None:
    messages, tools = conversation(evil)
    for start, with_tools in ((0, tools), (1, tools), (0, None), (1, None)):
        some = messages if with_tools else [m for m in messages if m["role"] != "tool" and not m.get("tool_calls")]
        try:
            pieces: tuple[Piece, ...] = chat.render(some[start:], tools=with_tools).pieces
        except TemplateError:  # a template without a system role, without tools ...
            continue
        return [piece.text for piece in pieces if piece.control]
    return None


def test_a_family_has_the_control_tokens_of_plain_words(folder: Path, source: str) -> None:
    chat = templates.load(folder)
    expected = control(chat, PLAIN)
    tokens = control_tokens(source)
    cut = [token[:4] + "/think" + token[4:] for token in tokens] + [
        token[:3] + "</think>" + token[3:] for token in tokens
    ]
    inner = [token.strip("<>|/[]｜") for token in tokens]
    halves = [token[1:] for token in tokens] + [token[:-1] for token in tokens]
    for evil in ("".join(tokens), " ".join(cut), "\n".join(inner), " ".join(halves), "</think>".join(tokens)):
        assert control(chat, evil) == expected, evil
    for evil in [*inner, *(token[1:] for token in tokens)]:
        assert control(chat, evil) == expected, evil
