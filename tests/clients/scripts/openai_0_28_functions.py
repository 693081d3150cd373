"""The OpenAI SDK before 1.0 and its dialect of tools: `functions` and `function_call`."""

import json

import openai
from harness import API_KEY, BASE_URL, MODEL, run

openai.api_base = BASE_URL
openai.api_key = API_KEY

FUNCTIONS = [
    {
        "name": "forecast",
        "description": "The weather of the next days",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
        },
    }
]


def ask(**options):
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How is the weather in Rome this week?"}],
        "functions": FUNCTIONS,
        "function_call": {"name": "forecast"},
        "max_tokens": 60,
        "temperature": 0,
        "request_timeout": 120,
        **options,
    }


def check_function_call():
    message = openai.ChatCompletion.create(**ask()).choices[0].message
    assert message["function_call"]["name"] == "forecast" and not message.get("tool_calls")
    arguments = json.loads(message["function_call"]["arguments"])
    assert arguments["city"] in ("Paris", "Rome", "Oslo") and 1 <= arguments["days"] <= 7


def check_streamed_function_call():
    whole = openai.ChatCompletion.create(**ask()).choices[0]
    choices = [chunk.choices[0] for chunk in openai.ChatCompletion.create(**ask(stream=True))]
    calls = [choice.delta["function_call"] for choice in choices if choice.delta.get("function_call")]
    assert "".join(call.get("arguments") or "" for call in calls) == whole.message.function_call.arguments
    assert [call["name"] for call in calls if call.get("name")] == ["forecast"]
    assert choices[-1].finish_reason == whole.finish_reason


def check_function_result_goes_back_in():
    message = openai.ChatCompletion.create(**ask()).choices[0].message
    history = [*ask()["messages"], message, {"role": "function", "name": "forecast", "content": '{"sun": true}'}]
    answer = openai.ChatCompletion.create(**ask(messages=history, function_call="none", max_tokens=16))
    assert answer.choices[0].message.content


if __name__ == "__main__":
    run(globals())
