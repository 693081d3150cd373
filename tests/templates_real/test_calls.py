"""Histories with tool calls in real templates: without tools, without ids, with several calls in a turn."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

import templates
from templates import ChatTemplates, TemplateError
from tests.templates_real.conversations import TOOLS
from tests.unit.template_folders import assistant, user

# Their templates fail in transformers too: at any tool call, since they change lists, or at these tools.
REFUSES = {"Kimi-K2-Instruct", "Kimi-K2-Thinking"}
FAILS_WITH_TOOLS = {"CohereForAI-c4ai-command-r-plus-tool_use", "llama-cpp-deepseek-r1"}


def history(number: int, ids: str | None, content: str | None) -> list[dict[str, Any]]:
    calls, results = [], []
    for place in range(number):
        function = {"name": "get_weather", "arguments": {"location": f"Wortprobe{place}"}}
        calls.append({"id": ids and f"{ids}{place}", "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": ids and f"{ids}{place}", "content": f"sunny{place}"})
    turn = {"role": "assistant", "content": content, "tool_calls": calls}
    return [user("weather?"), turn, *results, assistant("It is sunny."), user("thanks")]


def missing(chat: ChatTemplates, messages: list[dict[str, Any]], tools: Any) -> list[str]:
    """What is not in the prompt of the calls and their results."""
    text = chat.render(messages, tools=tools).text
    words = [call["function"]["arguments"]["location"] for call in messages[1]["tool_calls"]]
    words += [message["content"] for message in messages if message["role"] == "tool"]
    return [word for word in words if word not in text]


def test_no_call_and_no_result_is_lost(family: str, folder: Path) -> None:
    chat = templates.load(folder)
    for number, content in ((1, None), (1, ""), (1, "Let me see."), (2, None)):
        for ids, tools in product(("call_a1b2c3d4e5f6g7h", None, ""), (None, TOOLS)):
            messages = history(number, ids, content)
            if family in REFUSES:
                with pytest.raises(TemplateError, match="unsafe"):
                    chat.render(messages, tools=tools)
            elif not (tools and family in FAILS_WITH_TOOLS):
                assert missing(chat, messages, tools) == [], (number, content, ids, tools)
