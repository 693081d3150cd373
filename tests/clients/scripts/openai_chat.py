"""The current OpenAI SDK for Python: chat, streams and their helper, completions, models, errors, raw answers.

The client validates every chat answer and chunk strictly against the SDK's own types, so that a finish reason, a null
or a number of the wrong kind is an error here although the SDK would let it pass.
"""

import asyncio
import json

import openai
from harness import (
    API_KEY,
    BASE_URL,
    LONG_TEXT,
    MODEL,
    QUESTION,
    UNICODE_QUESTION,
    UNICODE_TEXT,
    UNKNOWN_MODEL,
    assert_unicode,
    raises,
    run,
)

SETTINGS = {"base_url": BASE_URL, "api_key": API_KEY, "timeout": 120, "_strict_response_validation": True}
client = openai.OpenAI(max_retries=0, **SETTINGS)
# For completions the SDK's types are narrower than the API: no null in a chunk's finish reason or an echo's logprobs.
lenient = openai.OpenAI(max_retries=0, **{**SETTINGS, "_strict_response_validation": False})


def ask(text=QUESTION, **options):
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, **options}


def check_chat():
    answer = client.chat.completions.create(**ask())
    (choice,) = answer.choices
    assert answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content.strip()
    assert choice.finish_reason in ("stop", "length") and choice.message.tool_calls is None
    assert answer.usage.prompt_tokens > 0 and 0 < answer.usage.completion_tokens <= 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_streamed_chat():
    whole = client.chat.completions.create(**ask())
    chunks = list(client.chat.completions.create(**ask(stream=True, stream_options={"include_usage": True})))
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices for chunk in chunks[:-1]) and chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def check_stream_helper():
    whole = client.chat.completions.create(**ask())
    with client.chat.completions.stream(**ask(), stream_options={"include_usage": True}) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert events.count("content.done") == 1 and events.count("content.delta") > 2
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage.model_dump() == whole.usage.model_dump()


def check_stream_helper_with_two_choices_and_logprobs():
    options = {"n": 2, "seed": 3, "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "extra_body": {"top_k": 20}}
    whole = client.chat.completions.create(**ask(**options))
    with client.chat.completions.stream(**ask(**options)) as stream:
        final = stream.until_done().current_completion_snapshot
    texts = [choice.message.content for choice in final.choices]
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    for choice in final.choices:
        assert "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content)
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def check_unicode_stream():
    options = ask(UNICODE_QUESTION, max_tokens=30)
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True))
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole
    assert_unicode(whole)
    assert all("\ufffd" not in piece for piece in pieces)


def check_stop_and_seed():
    first = client.chat.completions.create(**ask(stop=[" of"])).choices[0]
    assert first.finish_reason == "stop" and " of" not in first.message.content
    options = ask(temperature=1.2, seed=11, extra_body={"top_k": 20})
    texts = [client.chat.completions.create(**options).choices[0].message.content for _ in range(2)]
    assert texts[0] == texts[1]


def check_completions():
    prompts = ["One, two, three,", "The sky is"]
    options = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    both = lenient.completions.create(prompt=prompts, **options)
    assert [choice.index for choice in both.choices] == [0, 1] and both.object == "text_completion"
    alone = [lenient.completions.create(prompt=prompt, **options) for prompt in prompts]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]
    assert both.usage.total_tokens == sum(answer.usage.total_tokens for answer in alone)
    echoed = lenient.completions.create(prompt=prompts[0], echo=True, logprobs=1, **options).choices[0]
    assert echoed.text == prompts[0] + both.choices[0].text
    assert "".join(echoed.logprobs.tokens) == echoed.text and echoed.logprobs.token_logprobs[0] is None


def check_streamed_completions():
    options = {"model": MODEL, "prompt": " ".join([UNICODE_TEXT] * 4), "max_tokens": 24, "temperature": 0}
    whole = lenient.completions.create(**options).choices[0]
    chunks = list(lenient.completions.create(**options, stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == whole.finish_reason
    assert_unicode(whole.text)


def check_models():
    models = client.models.list().data
    assert MODEL in [model.id for model in models]
    assert all(model.object == "model" and model.created > 0 and model.owned_by for model in models)
    assert client.models.retrieve(MODEL).id == MODEL
    with raises(openai.NotFoundError):
        client.models.retrieve(UNKNOWN_MODEL)


def check_unknown_model():
    for stream in (False, True):
        with raises(openai.NotFoundError) as caught:
            client.chat.completions.create(**ask(model=UNKNOWN_MODEL, stream=stream))
        assert (caught[0].code, caught[0].param) == ("model_not_found", "model")
        assert caught[0].type == "invalid_request_error" and UNKNOWN_MODEL in caught[0].message


def check_bad_temperature():
    for stream in (False, True):
        with raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ask(temperature=3, stream=stream))
        assert caught[0].param == "temperature" and caught[0].type == "invalid_request_error" and caught[0].code


def check_long_prompt():
    for stream in (False, True):
        with raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ask(LONG_TEXT, stream=stream))
        assert (caught[0].code, caught[0].param) == ("context_length_exceeded", "messages")
    with raises(openai.BadRequestError) as caught:
        lenient.completions.create(model=MODEL, prompt=LONG_TEXT)
    assert (caught[0].code, caught[0].param) == ("context_length_exceeded", "prompt")


def check_wrong_key():
    with raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").chat.completions.create(**ask())
    assert caught[0].code == "invalid_api_key"


def check_unknown_route():
    with raises(openai.NotFoundError) as caught:
        client.embeddings.create(model=MODEL, input="text")
    assert caught[0].code == "unknown_url"


def check_bad_request_is_not_retried():
    sent = []
    http_client = openai.DefaultHttpxClient(event_hooks={"request": [sent.append]})
    patient = openai.OpenAI(max_retries=2, http_client=http_client, **SETTINGS)
    with raises(openai.BadRequestError):
        patient.chat.completions.create(**ask(top_p=7))
    assert len(sent) == 1


def check_timeout_and_abandoned_stream_leave_the_endpoint_usable():
    with raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(**ask("Count to a thousand.", max_tokens=1000))
    stream = client.chat.completions.create(**ask("Count to a thousand.", max_tokens=1000, stream=True))
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(**ask()).choices[0].message.content


def check_raw_response():
    raw = client.chat.completions.with_raw_response.create(**ask())
    assert raw.status_code == 200 and raw.headers["content-type"].startswith("application/json")
    assert raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(**ask(stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "chat.completion.chunk" for line in lines[:-1])


def check_request_id():
    raw = client.chat.completions.with_raw_response.create(**ask(), extra_headers={"X-Request-Id": "check-7"})
    assert raw.headers["x-request-id"] == "check-7" and raw.parse().id == "chatcmpl-check-7"


def check_stream_flag_decides_the_kind_of_answer():
    for flag in ({}, {"stream": None}, {"stream": False}):
        raw = client.chat.completions.with_raw_response.create(**ask(), **flag)
        assert raw.headers["content-type"].startswith("application/json"), flag
        assert raw.parse().object == "chat.completion", flag
    raw = client.chat.completions.with_raw_response.create(**ask(), stream=True)
    assert raw.headers["content-type"].startswith("text/event-stream")


def check_own_message_goes_back_in():
    message = client.chat.completions.create(**ask()).choices[0].message.model_dump()
    assert None in message.values(), "the message has no null field, so this check shows nothing"
    history = [*ask()["messages"], message, {"role": "user", "content": "And of Spain?"}]
    assert client.chat.completions.create(**ask(messages=history)).choices[0].message.content


async def check_async_streams_share_the_endpoint():
    async def streamed(options):
        chunks = await many.chat.completions.create(**options, stream=True)
        return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])

    sampling = {"temperature": 0.9, "max_tokens": 8, "extra_body": {"top_k": 20}}
    options = [ask(f"Tell me about the number {i}.", seed=i, **sampling) for i in range(6)]
    alone = [client.chat.completions.create(**each).choices[0].message.content for each in options]
    async with openai.AsyncOpenAI(max_retries=0, **SETTINGS) as many:
        assert await asyncio.gather(*map(streamed, options)) == alone


if __name__ == "__main__":
    run(globals())
