"""Instructor's patched client doing ordinary work: what is not asked to be structured passes through unchanged."""

import instructor
import openai
from harness import (
    API_KEY,
    BASE_URL,
    LONG_TEXT,
    MODEL,
    QUESTION,
    UNICODE_QUESTION,
    UNKNOWN_MODEL,
    assert_unicode,
    raises,
    run,
)

SETTINGS = {"base_url": BASE_URL, "api_key": API_KEY, "timeout": 120, "max_retries": 0}
client = instructor.from_openai(openai.OpenAI(**SETTINGS))


def ask(text=QUESTION, **options):
    messages = [{"role": "user", "content": text}]
    settings = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, "response_model": None}
    return {**settings, **options}


def check_chat():
    answer = client.chat.completions.create(**ask())
    assert answer.choices[0].message.content.strip() and answer.usage.completion_tokens > 0


def check_streamed_chat():
    whole = client.chat.completions.create(**ask()).choices[0].message.content
    chunks = client.chat.completions.create(**ask(), stream=True)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == whole


def check_unicode_stream():
    chunks = client.chat.completions.create(**ask(UNICODE_QUESTION, max_tokens=30), stream=True)
    assert_unicode("".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices))


async def check_async_chat():
    asynchronous = instructor.from_openai(openai.AsyncOpenAI(**SETTINGS))
    answer = await asynchronous.chat.completions.create(**ask())
    assert answer.choices[0].message.content == client.chat.completions.create(**ask()).choices[0].message.content


def check_unknown_model():
    with raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**ask(model=UNKNOWN_MODEL))
    assert caught[0].code == "model_not_found"


def check_bad_temperature():
    with raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask(temperature=3))
    assert caught[0].param == "temperature"


def check_long_prompt():
    with raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ask(LONG_TEXT))
    assert caught[0].code == "context_length_exceeded"


if __name__ == "__main__":
    run(globals())
