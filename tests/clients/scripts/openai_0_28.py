"""The OpenAI SDK before 1.0: module-level configuration, ChatCompletion.create, openai.error."""

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

openai.api_base = BASE_URL
openai.api_key = API_KEY


def ask(text=QUESTION, **options):
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 16,
        "temperature": 0,
        "request_timeout": 120,
        **options,
    }


def check_chat():
    answer = openai.ChatCompletion.create(**ask())
    assert answer.object == "chat.completion" and answer["model"] == MODEL
    assert answer.choices[0]["message"]["role"] == "assistant"
    assert answer.choices[0].message.content.strip()
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_streamed_chat():
    whole = openai.ChatCompletion.create(**ask()).choices[0]
    choices = [chunk.choices[0] for chunk in openai.ChatCompletion.create(**ask(stream=True))]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole.message.content
    assert choices[-1].finish_reason == whole.finish_reason


def check_unicode_stream():
    options = ask(UNICODE_QUESTION, max_tokens=30)
    chunks = openai.ChatCompletion.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.get("content") or "" for chunk in chunks)
    assert_unicode(text)
    assert text == openai.ChatCompletion.create(**options).choices[0].message.content


async def check_async_chat():
    whole = await openai.ChatCompletion.acreate(**ask())
    stream = await openai.ChatCompletion.acreate(**ask(stream=True))
    pieces = [chunk.choices[0].delta.get("content") or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content


def check_completions():
    options = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    whole = openai.Completion.create(**options)
    assert whole.object == "text_completion" and whole.choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in openai.Completion.create(**options, stream=True))
    assert streamed == whole.choices[0].text


def check_models():
    assert MODEL in [model.id for model in openai.Model.list().data]
    assert openai.Model.retrieve(MODEL).id == MODEL


def check_unknown_model():
    for stream in (False, True):
        with raises(openai.error.InvalidRequestError) as caught:
            openai.ChatCompletion.create(**ask(model=UNKNOWN_MODEL, stream=stream))
        assert caught[0].http_status == 404
        assert (caught[0].code, caught[0].param) == ("model_not_found", "model")


def check_bad_temperature():
    for stream in (False, True):
        with raises(openai.error.InvalidRequestError) as caught:
            openai.ChatCompletion.create(**ask(temperature=3, stream=stream))
        assert caught[0].http_status == 400 and caught[0].param == "temperature"


def check_long_prompt():
    with raises(openai.error.InvalidRequestError) as caught:
        openai.ChatCompletion.create(**ask(LONG_TEXT))
    assert (caught[0].code, caught[0].param) == ("context_length_exceeded", "messages")


def check_wrong_key():
    with raises(openai.error.AuthenticationError) as caught:
        openai.ChatCompletion.create(**ask(api_key="wrong"))
    assert caught[0].http_status == 401


def check_timeout_leaves_the_endpoint_usable():
    with raises(openai.error.Timeout):
        openai.ChatCompletion.create(**ask("Count to a thousand.", max_tokens=1000, request_timeout=0.2))
    assert openai.ChatCompletion.create(**ask()).choices[0].message.content


if __name__ == "__main__":
    run(globals())
