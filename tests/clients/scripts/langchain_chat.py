"""LangChain's ChatOpenAI and OpenAI models (package langchain-openai)."""

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
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

SETTINGS = {"base_url": BASE_URL, "api_key": API_KEY, "temperature": 0, "max_retries": 0, "timeout": 120}


def chat_model(**options):
    return ChatOpenAI(**{**SETTINGS, "model": MODEL, "max_tokens": 16, **options})


def check_chat():
    answer = chat_model().invoke(QUESTION)
    assert isinstance(answer, AIMessage) and answer.content.strip()
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata["total_tokens"] > answer.usage_metadata["output_tokens"] > 0


def check_conversation():
    history = [SystemMessage("Answer in one word."), HumanMessage(QUESTION)]
    answer = chat_model().invoke(history)
    assert chat_model().invoke([*history, answer, HumanMessage("And of Spain?")]).content


def check_streamed_chat():
    model = chat_model(stream_usage=True)
    chunks = list(model.stream(QUESTION))
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    whole = model.invoke(QUESTION)
    assert len(chunks) > 3 and merged.content == whole.content
    assert merged.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert merged.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def check_unicode_stream():
    model = chat_model(max_tokens=30)
    text = "".join(chunk.content for chunk in model.stream(UNICODE_QUESTION))
    assert_unicode(text)
    assert text == model.invoke(UNICODE_QUESTION).content


def check_chain_and_batch():
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "Tell me about {thing}.")])
    chain = prompt | chat_model() | StrOutputParser()
    things = [{"thing": name} for name in ("rain", "snow", "wind")]
    assert chain.batch(things) == [chain.invoke(thing) for thing in things]


async def check_async_stream():
    model = chat_model()
    pieces = [chunk.content async for chunk in model.astream(QUESTION)]
    assert "".join(pieces) == (await model.ainvoke(QUESTION)).content


def check_completions():
    model = OpenAI(**SETTINGS, model=MODEL, max_tokens=8)
    text = model.invoke("One, two, three,")
    assert text and "".join(model.stream("One, two, three,")) == text
    assert [row[0].text for row in model.generate(["One, two, three,"] * 2).generations] == [text, text]


def check_unknown_model():
    with raises(openai.NotFoundError) as caught:
        chat_model(model=UNKNOWN_MODEL).invoke(QUESTION)
    assert caught[0].code == "model_not_found"


def check_bad_temperature():
    with raises(openai.BadRequestError) as caught:
        list(chat_model(temperature=3).stream(QUESTION))
    assert caught[0].param == "temperature"


def check_long_prompt():
    with raises(ContextOverflowError) as caught:
        chat_model().invoke(LONG_TEXT)
    assert caught[0].code == "context_length_exceeded"


def check_wrong_key():
    with raises(openai.AuthenticationError):
        chat_model(api_key="wrong").invoke(QUESTION)


if __name__ == "__main__":
    run(globals())
