"""LlamaIndex's OpenAILike model, as a chat model and as a completion model."""

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
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def language_model(**options):
    settings = {
        "model": MODEL,
        "api_base": BASE_URL,
        "api_key": API_KEY,
        "is_chat_model": True,
        "context_window": 8192,
        "max_tokens": 16,
        "temperature": 0,
        "max_retries": 0,
        "timeout": 120,
    }
    return OpenAILike(**{**settings, **options})


def messages(text=QUESTION):
    return [ChatMessage(role="user", content=text)]


def check_chat():
    answer = language_model().chat(messages())
    assert answer.message.role == "assistant" and answer.message.content.strip()
    assert answer.raw.usage.total_tokens > answer.raw.usage.completion_tokens > 0
    history = [ChatMessage(role="system", content="Be brief."), *messages(), answer.message, *messages("And of Spain?")]
    assert language_model().chat(history).message.content


def check_streamed_chat():
    chunks = list(language_model().stream_chat(messages()))
    assert len(chunks) > 3
    assert "".join(chunk.delta or "" for chunk in chunks) == chunks[-1].message.content
    assert chunks[-1].message.content == language_model().chat(messages()).message.content


def check_unicode_stream():
    model = language_model(max_tokens=30)
    text = "".join(chunk.delta or "" for chunk in model.stream_chat(messages(UNICODE_QUESTION)))
    assert_unicode(text)
    assert text == model.chat(messages(UNICODE_QUESTION)).message.content


async def check_async_chat():
    answer = await language_model().achat(messages())
    stream = await language_model().astream_chat(messages())
    assert "".join([chunk.delta or "" async for chunk in stream]) == answer.message.content


def check_completions():
    model = language_model(is_chat_model=False)
    answer = model.complete("One, two, three,")
    assert answer.text and answer.raw.object == "text_completion"
    assert "".join(chunk.delta for chunk in model.stream_complete("One, two, three,")) == answer.text


def check_unknown_model():
    with raises(openai.NotFoundError) as caught:
        language_model(model=UNKNOWN_MODEL).chat(messages())
    assert caught[0].code == "model_not_found"


def check_bad_temperature():
    with raises(openai.BadRequestError) as caught:
        language_model().chat(messages(), temperature=3)
    assert caught[0].param == "temperature"


def check_long_prompt():
    with raises(openai.BadRequestError) as caught:
        list(language_model().stream_chat(messages(LONG_TEXT)))
    assert caught[0].code == "context_length_exceeded"


def check_wrong_key():
    with raises(openai.AuthenticationError):
        language_model(api_key="wrong").chat(messages())


if __name__ == "__main__":
    run(globals())
