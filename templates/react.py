"""Tool calls for models whose own template knows no tools: the ReAct form, in plain text.

The tools and the form of an answer are described in front of the latest question; the model answers in lines
"Thought:", "Action:", "Action Input:" and is stopped at "Observation:"; a tool's result is written there, and the model
goes on in the same turn. Rewrites messages into messages without tools: any template can render the result.
"""

from __future__ import annotations

import json
from typing import Any

from templates.conversation import Messages

STOP_WORD = "\nObservation:"

TOOL_LINE = (
    "{name}: Call this tool to interact with the {name} API. What is the {name} API useful for? "
    "{description} Parameters: {parameters}"
)
INSTRUCTION = """Answer the following questions as best you can. You have access to the following APIs:

{tools}

Use the following format:

Question: the input question you must answer
Thought: you should always think about what to do
Action: the action to take, should be one of [{names}]
Action Input: the input to the action
Observation: the result of the action
... (this Thought/Action/Action Input/Observation can be repeated zero or more times)
Thought: I now know the final answer
Final Answer: the final answer to the original input question

Begin!"""


def has_tool_turns(messages: Messages) -> bool:
    return any(message.get("tool_calls") or message["role"] in ("tool", "function") for message in messages)


def rewrite(messages: Messages, tools: list[dict[str, Any]] | None) -> tuple[Messages, bool]:
    """(messages without tools, whether the last of them is an assistant turn to go on with).

    `messages`: contents are text. Without tools the history is rewritten and nothing is asked for."""
    rewritten: Messages = []
    for message in messages:
        role = message["role"]
        if role in ("tool", "function"):
            _go_on(rewritten, f"\nObservation: {message['content']}")
        elif role == "assistant":
            _go_on(rewritten, _assistant_text(message, bool(tools)))
        else:
            rewritten.append({"role": role, "content": message["content"]})
    goes_on = bool(rewritten) and messages[-1]["role"] in ("tool", "function")
    if goes_on:
        rewritten[-1]["content"] += "\nThought:"
    if tools:
        _instruct(rewritten, tools)
    return rewritten, goes_on


def _go_on(rewritten: Messages, text: str) -> None:
    """Calls, results and answers of one round are one assistant turn."""
    if rewritten and rewritten[-1]["role"] == "assistant":
        separator = "" if text.startswith("\n") else "\n"
        rewritten[-1]["content"] += separator + text
    else:
        rewritten.append({"role": "assistant", "content": text.lstrip("\n")})


def _assistant_text(message: dict[str, Any], asks: bool) -> str:
    content = (message.get("content") or "").strip()
    calls = message.get("tool_calls") or []
    if not calls:
        if asks and not content.startswith(("Thought:", "Final Answer:")):
            return f"Thought: I now know the final answer.\nFinal Answer: {content}"
        return content
    lines = [content if content.startswith("Thought:") else f"Thought: {content}".rstrip()]
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        lines += [f"Action: {function['name']}", f"Action Input: {arguments}"]
    return "\n".join(lines)


def _instruct(messages: Messages, tools: list[dict[str, Any]]) -> None:
    """Puts the instruction in front of the latest question."""
    functions = [tool.get("function", tool) for tool in tools]
    lines = [
        TOOL_LINE.format(
            name=function["name"],
            description=function.get("description") or "",
            parameters=json.dumps(function.get("parameters") or {}, ensure_ascii=False),
        )
        for function in functions
    ]
    names = ",".join(function["name"] for function in functions)
    text = INSTRUCTION.format(tools="\n\n".join(lines), names=names)
    for message in reversed(messages):
        if message["role"] == "user":
            message["content"] = f"{text}\n\nQuestion: {message['content']}"
            return
    messages.append({"role": "user", "content": text})
