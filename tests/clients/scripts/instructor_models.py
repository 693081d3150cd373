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
    partial = client(instructor.Mode.TOOLS).chat.completions.create_partial(response_model=Forecast, **ask())
    answers = list(partial)
    assert len(answers) > 2 and answers[0] != answers[-1]
    assert answers[-1].city in ("Paris", "Rome", "Oslo") and 1 <= answers[-1].days <= 7


def check_list_of_models():
    answers = client(instructor.Mode.TOOLS).chat.completions.create(response_model=list[Forecast], **ask())
    assert all(isinstance(answer, Forecast) for answer in answers)


if __name__ == "__main__":
    run(globals())
