"""The real thing from end to end: OpenAI's SDK, the gateway, the SDK worker, the engine and the demo model."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.e2e.served import Served

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["/v2/local/openai/v1", "/v1"])
def test_chat_and_completions_streamed_and_not(served: Served, prefix: str) -> None:
    sdk = OpenAI(base_url=served.origin + prefix, api_key="none", max_retries=0, timeout=120)
    model = sdk.models.list().data[0].id
    assert sdk.models.retrieve(model).id == model

    greedy: Any = {"model": model, "temperature": 0, "max_tokens": 12}
    whole = sdk.chat.completions.create(messages=MESSAGES, **greedy)
    chunks = list(sdk.chat.completions.create(messages=MESSAGES, stream=True, **greedy))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "Paris" in said and said == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.prompt_tokens == 37

    text = sdk.completions.create(prompt="Once upon a time", **greedy)
    pieces = list(sdk.completions.create(prompt="Once upon a time", stream=True, **greedy))
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == text.choices[0].text != ""


@pytest.mark.slow
def test_errors_are_the_sdks_own_classes(served: Served) -> None:
    sdk = OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=120)
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="nobody", messages=MESSAGES, stream=True)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(model="", messages=MESSAGES, temperature=9)
    assert wrong.value.param == "temperature"


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_mean_nothing_here_are_named_in_a_header(served: Served, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": stream, "no_such_field": 1}
    answer = httpx.post(f"{served.base_url}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "no_such_field"
