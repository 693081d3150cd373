"""The current OpenAI SDK for Python: parsed answers, tools and the older functions, whole and streamed.

Shows validity, not wisdom: whatever a small model says, it must fit the schema that was asked for.
"""

import json
from typing import Literal

import openai
import pydantic
from harness import API_KEY, BASE_URL, MODEL, raises, run

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, timeout=120, max_retries=0, _strict_response_validation=True)


class Forecast(pydantic.BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=7)
    note: str = pydantic.Field(max_length=20)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


TOOLS = [openai.pydantic_function_tool(Forecast), openai.pydantic_function_tool(Person)]
NAMED = {"type": "function", "function": {"name": "Person"}}


def ask(text="How is the weather in Rome this week?", **options):
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 120, "temperature": 0, **options}


def check_parse():
    answer = client.chat.completions.parse(**ask(), response_format=Forecast)
    assert isinstance(answer.choices[0].message.parsed, Forecast)
    assert answer.choices[0].finish_reason == "stop"


def check_streamed_parse():
    with client.chat.completions.stream(**ask(), response_format=Forecast) as stream:
        snapshots = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert any(isinstance(snapshot, dict) for snapshot in snapshots), "no part of the answer was readable on the way"
    whole = client.chat.completions.parse(**ask(), response_format=Forecast).choices[0].message
    assert isinstance(final.parsed, Forecast) and final.parsed == whole.parsed and final.content == whole.content


def check_json_object():
    answer = client.chat.completions.create(
        **ask("Write a JSON object with the key city.", response_format={"type": "json_object"})
    ).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    else:
        assert answer.message.content.lstrip().startswith("{")


def check_required_tool():
    answer = client.chat.completions.parse(**ask(), tools=TOOLS, tool_choice="required").choices[0]
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    assert answer.message.tool_calls
    for call in answer.message.tool_calls:
        assert call.type == "function" and call.id
        assert isinstance(call.function.parsed_arguments, {"Forecast": Forecast, "Person": Person}[call.function.name])
    assert len({call.id for call in answer.message.tool_calls}) == len(answer.message.tool_calls)


def check_named_tool():
    answer = client.chat.completions.parse(**ask(), tools=TOOLS, tool_choice=NAMED).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "Person" and isinstance(call.function.parsed_arguments, Person)


def check_streamed_tools():
    for tool_choice in ("required", NAMED):
        whole = client.chat.completions.parse(**ask(), tools=TOOLS, tool_choice=tool_choice).choices[0]
        with client.chat.completions.stream(**ask(), tools=TOOLS, tool_choice=tool_choice) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        calls = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
        assert "".join(deltas) == "".join(arguments for _, arguments in calls)
        assert [(event.name, event.arguments) for event in done] == calls
        assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert final.finish_reason == whole.finish_reason


def check_one_call_only():
    options = ask("The weather in Rome, in Oslo and in Paris, please.", tool_choice="required")
    answer = client.chat.completions.create(**options, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1


def check_tools_with_two_choices():
    options = ask(n=2, temperature=1, seed=5, tool_choice="required", extra_body={"top_k": 20})
    with client.chat.completions.stream(**options, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.parse(**options, tools=TOOLS)
    for streamed, choice in zip(final.choices, whole.choices, strict=True):
        calls = [call.function.arguments for call in streamed.message.tool_calls]
        assert calls == [call.function.arguments for call in choice.message.tool_calls]


def check_no_tool():
    answer = client.chat.completions.create(**ask(tool_choice="none", max_tokens=16), tools=TOOLS).choices[0]
    assert answer.message.tool_calls is None and answer.message.content


def check_tool_result_goes_back_in():
    message = client.chat.completions.create(**ask(tool_choice=NAMED), tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"found": true}'}
    history = [*ask()["messages"], message.model_dump(), result]
    answer = client.chat.completions.create(**ask(messages=history, max_tokens=16), tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content


def check_functions():
    functions = [{"name": "Person", "parameters": Person.model_json_schema()}]
    options = ask(functions=functions, function_call={"name": "Person"})
    message = client.chat.completions.create(**options).choices[0].message
    assert message.tool_calls is None and message.function_call.name == "Person"
    Person.model_validate_json(message.function_call.arguments)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
    calls = [delta.function_call for delta in deltas if delta.function_call]
    assert "".join(call.arguments or "" for call in calls) == message.function_call.arguments
    assert [call.name for call in calls if call.name] == ["Person"]


def check_bad_schema():
    schema = {"type": "object", "properties": {"a": {"type": "no-such-type"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        with raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ask(response_format=wanted, stream=stream))
        assert caught[0].param.startswith("response_format")


def check_unknown_tool_name():
    named = {"type": "function", "function": {"name": "nobody"}}
    with raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask(tool_choice=named), tools=TOOLS)
    assert caught[0].param.startswith("tool_choice")


if __name__ == "__main__":
    run(globals())
