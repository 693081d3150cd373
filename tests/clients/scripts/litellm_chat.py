"""LiteLLM's completion functions with its `openai/` provider, and its own error classes."""

import litellm
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

CONNECTION = {"api_base": BASE_URL, "api_key": API_KEY, "max_retries": 0, "timeout": 120}


def ask(text=QUESTION, **options):
    messages = [{"role": "user", "content": text}]
    settings = {"model": "openai/" + MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
    return {**CONNECTION, **settings, **options}


def check_chat():
    answer = litellm.completion(**ask())
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content.strip()
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_streamed_chat():
    whole = litellm.completion(**ask())
    chunks = list(litellm.completion(**ask(), stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert len(chunks) > 3
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason
    assert rebuilt.usage.total_tokens == whole.usage.total_tokens


def check_unicode_stream():
    options = ask(UNICODE_QUESTION, max_tokens=30)
    chunks = litellm.completion(**options, stream=True)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert_unicode(text)
    assert text == litellm.completion(**options).choices[0].message.content


async def check_async_stream():
    whole = await litellm.acompletion(**ask())
    stream = await litellm.acompletion(**ask(), stream=True)
    pieces = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content


def check_completions():
    options = {**CONNECTION, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    model = "text-completion-openai/" + MODEL
    whole = litellm.text_completion(model=model, **options)
    chunks = litellm.text_completion(model=model, **options, stream=True)
    assert whole.choices[0].text
    assert "".join(choice.text or "" for chunk in chunks for choice in chunk.choices) == whole.choices[0].text


def check_unknown_model():
    with raises(litellm.NotFoundError) as caught:
        litellm.completion(**ask(model="openai/" + UNKNOWN_MODEL))
    assert caught[0].status_code == 404 and UNKNOWN_MODEL in str(caught[0])


def check_bad_temperature():
    for stream in (False, True):
        with raises(litellm.BadRequestError) as caught:
            list(litellm.completion(**ask(temperature=3, stream=stream)))
        assert caught[0].status_code == 400 and "temperature" in str(caught[0])


def check_long_prompt():
    with raises(litellm.ContextWindowExceededError):
        litellm.completion(**ask(LONG_TEXT))


def check_wrong_key():
    with raises(litellm.AuthenticationError):
        litellm.completion(**ask(api_key="wrong"))


if __name__ == "__main__":
    run(globals())
