"""LangChain of 2023 on the OpenAI SDK 0.28: the classes and chains that older articles are written with."""

import openai
from harness import API_KEY, BASE_URL, LONG_TEXT, MODEL, QUESTION, UNICODE_QUESTION, assert_unicode, raises, run
from langchain.chains import LLMChain
from langchain.chat_models import ChatOpenAI
from langchain.llms import OpenAI
from langchain.prompts import PromptTemplate
from langchain.schema import HumanMessage

SETTINGS = {"openai_api_base": BASE_URL, "openai_api_key": API_KEY, "temperature": 0, "max_retries": 1}


def chat_model(**options):
    return ChatOpenAI(**{**SETTINGS, "model": MODEL, "max_tokens": 16, **options})


def check_chat():
    answer = chat_model()([HumanMessage(content=QUESTION)])
    assert answer.content.strip()


def check_streamed_chat():
    model = chat_model(max_tokens=30)
    text = "".join(chunk.content for chunk in model.stream(UNICODE_QUESTION))
    assert_unicode(text)
    assert text == model.invoke(UNICODE_QUESTION).content


def check_chain():
    chain = LLMChain(llm=chat_model(), prompt=PromptTemplate.from_template("Tell me about {thing}."))
    assert chain.run(thing="rain").strip()


def check_completions():
    model = OpenAI(**SETTINGS, model=MODEL, max_tokens=8)
    text = model.invoke("One, two, three,")
    assert text and "".join(model.stream("One, two, three,")) == text


def check_long_prompt():
    with raises(openai.error.InvalidRequestError) as caught:
        chat_model().invoke(LONG_TEXT)
    assert caught[0].code == "context_length_exceeded"


if __name__ == "__main__":
    run(globals())
