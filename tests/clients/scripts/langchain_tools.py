"""LangChain's with_structured_output and bind_tools, in each of the ways that it can ask for them."""

from typing import Literal

from harness import API_KEY, BASE_URL, MODEL, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "How is the weather in Rome this week?"


class Forecast(BaseModel):
    """The weather of the next days."""

    model_config = ConfigDict(extra="forbid")  # where a schema allows more, a small model makes it up without end
    city: Literal["Paris", "Rome", "Oslo"] = Field(description="Where")
    days: int = Field(ge=1, le=7, description="How many days")


@tool
def forecast(city: Literal["Paris", "Rome", "Oslo"], sunny: bool) -> str:
    """The weather of the next days."""
    return f"{city}: {'sun' if sunny else 'rain'}"


@tool
def add(first: Literal[1, 2, 3], second: Literal[1, 2, 3]) -> int:
    """Adds two numbers."""
    return first + second


model = ChatOpenAI(
    base_url=BASE_URL, api_key=API_KEY, model=MODEL, max_tokens=80, temperature=0, max_retries=0, timeout=120
)


def check_structured_output_by_json_schema():
    answer = model.with_structured_output(Forecast, method="json_schema").invoke(QUESTION)
    assert isinstance(answer, Forecast)


def check_structured_output_by_function_calling():
    structured = model.with_structured_output(Forecast, method="function_calling", include_raw=True)
    answer = structured.invoke(QUESTION)
    assert answer["parsing_error"] is None and isinstance(answer["parsed"], Forecast)
    assert [call["name"] for call in answer["raw"].tool_calls] == ["Forecast"]


def check_streamed_structured_output():
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Forecast.model_json_schema(), method=method)
        assert list(structured.stream(QUESTION))[-1] == structured.invoke(QUESTION), method


def check_required_tool():
    answer = model.bind_tools([forecast, add], tool_choice="required").invoke(QUESTION)
    assert answer.tool_calls and not answer.invalid_tool_calls
    tools = {"forecast": forecast, "add": add}
    assert all(tools[call["name"]].invoke(call["args"]) is not None for call in answer.tool_calls)


def check_named_tool_streamed():
    bound = model.bind_tools([forecast, add], tool_choice="add")
    chunks = list(bound.stream(QUESTION))
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    whole = bound.invoke(QUESTION)
    assert [call["name"] for call in merged.tool_calls] == ["add"]
    assert [call["args"] for call in merged.tool_calls] == [call["args"] for call in whole.tool_calls]


def check_tool_result_goes_back_in():
    answer = model.bind_tools([forecast], tool_choice="forecast").invoke(QUESTION)
    (call,) = answer.tool_calls
    result = ToolMessage(forecast.invoke(call["args"]), tool_call_id=call["id"])
    assert model.invoke([HumanMessage(QUESTION), answer, result]).content


if __name__ == "__main__":
    run(globals())
