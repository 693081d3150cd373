"""LiteLLM with tools and with a pydantic model as response format, whole and streamed."""

import json
from typing import Literal

import litellm
from harness import API_KEY, BASE_URL, MODEL, run
from pydantic import BaseModel, Field


class Forecast(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=7)


TOOL = {"type": "function", "function": {"name": "forecast", "parameters": Forecast.model_json_schema()}}


def ask(**options):
    return {
        "api_base": BASE_URL,
        "api_key": API_KEY,
        "model": "openai/" + MODEL,
        "messages": [{"role": "user", "content": "How is the weather in Rome this week?"}],
        "max_tokens": 80,
        "temperature": 0,
        "timeout": 120,
        "max_retries": 0,
        **options,
    }


def check_response_format():
    answer = litellm.completion(**ask(), response_format=Forecast)
    Forecast.model_validate_json(answer.choices[0].message.content)


def check_tools():
    for tool_choice in ("required", {"type": "function", "function": {"name": "forecast"}}):
        calls = litellm.completion(**ask(), tools=[TOOL], tool_choice=tool_choice).choices[0].message.tool_calls
        assert calls and all(call.function.name == "forecast" for call in calls)
        for call in calls:
            Forecast.model_validate_json(call.function.arguments)


def check_streamed_tools():
    options = {**ask(), "tools": [TOOL], "tool_choice": "required"}
    whole = litellm.completion(**options).choices[0]
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**options, stream=True))).choices[0]
    assert rebuilt.finish_reason == whole.finish_reason
    assert [json.loads(call.function.arguments) for call in rebuilt.message.tool_calls] == [
        json.loads(call.function.arguments) for call in whole.message.tool_calls
    ]


if __name__ == "__main__":
    run(globals())
