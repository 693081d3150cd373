"""Instructor answering with pydantic models, in each mode that an OpenAI endpoint can serve."""

from typing import Literal

import instructor
import openai
from harness import API_KEY, BASE_URL, MODEL, run
from pydantic import BaseModel, Field


class Forecast(BaseModel):
    """The weather of the next days."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=7)
    note: str = Field(max_length=20)


class Journey(BaseModel):
    stops: list[Forecast] = Field(min_length=1, max_length=2)


def client(mode):
    connection = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, timeout=120, max_retries=0)
    return instructor.from_openai(connection, mode=mode)


def ask(**options):
    messages = [{"role": "user", "content": "How is the weather in Rome this week?"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 150, "temperature": 0, "max_retries": 0, **options}


def check_tools():
    answer, completion = client(instructor.Mode.TOOLS).chat.completions.create_with_completion(
        response_model=Forecast, **ask()
    )
    assert isinstance(answer, Forecast) and completion.choices[0].message.tool_calls


def check_json_schema():
    answer = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(response_model=Forecast, **ask())
    assert isinstance(answer, Forecast)


def check_partial_answers():
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        answers = list(client(mode).chat.completions.create_partial(response_model=Forecast, **ask()))
        assert Forecast.model_validate(answers[-1].model_dump()), mode
    assert len({answer.model_dump_json() for answer in answers}) > 2, "the answer came in one piece"


def check_nested_models():
    answer = client(instructor.Mode.TOOLS).chat.completions.create(response_model=Journey, **ask())
    assert isinstance(answer, Journey) and 1 <= len(answer.stops) <= 2


if __name__ == "__main__":
    run(globals())
