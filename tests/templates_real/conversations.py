"""The matrix of conversations that every real template is rendered with."""

from __future__ import annotations

from typing import Any

from tests.unit.template_folders import assistant, system, user

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather <now>",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {"type": "string", "description": 'City & "place"'},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["location"],
            },
        },
    }
]


def call(arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call12345", "type": "function", "function": function}],
    }


RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"t": 20}'}
TERSE = system("You are terse. <b>é</b>")
CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}

# name -> (messages, options)
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "single": ([user("Hi there")], {}),
    "system": ([TERSE, user("Hi <there> & 'you' [x]  ")], {}),
    "multi-turn": ([user("a"), assistant("b"), user("c\n\n"), assistant("  d  "), user("e")], {}),
    "system, multi-turn": ([TERSE, user("a"), assistant("b"), user("c")], {}),
    "tools": ([TERSE, user("weather?")], {"tools": TOOLS}),
    "tool result": ([user("weather?"), call({"location": "Paris <x>", "n": 2}), RESULT], {"tools": TOOLS}),
    "after a tool": (
        [TERSE, user("weather?"), call({"location": "Paris"}), RESULT, assistant("It is 20."), user("thanks")],
        {"tools": TOOLS},
    ),
    "thought in the text": ([user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")], {}),
    "thought in a field": ([user("a"), {**assistant("b"), "reasoning_content": "hm"}, user("c")], {}),
    "continue": ([user("a"), assistant("The answer is ")], CONTINUE),
    "continue a copy": ([TERSE, user("a"), assistant("b"), user("a"), assistant("b")], CONTINUE),
    "no prompt": ([user("a"), assistant("b")], {"add_generation_prompt": False}),
    "no thinking": ([user("a")], {"kwargs": {"enable_thinking": False}}),
    "parts": ([user([{"type": "text", "text": "Hi"}])], {}),
}
