"""The chains of 2023 that extract structures through OpenAI's `functions` dialect."""

from harness import API_KEY, BASE_URL, MODEL, run
from langchain.chains import create_extraction_chain
from langchain.chains.openai_functions import create_openai_fn_chain, create_structured_output_chain
from langchain.chat_models import ChatOpenAI
from langchain.prompts import ChatPromptTemplate

SCHEMA = {
    "title": "Forecast",
    "description": "The weather of the next days",
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
}
TEXT = "It will rain in Rome for three days."

model = ChatOpenAI(
    openai_api_base=BASE_URL, openai_api_key=API_KEY, model=MODEL, temperature=0, max_tokens=150, max_retries=1
)
prompt = ChatPromptTemplate.from_messages([("system", "Extract what the text says."), ("human", "{input}")])


def assert_forecast(found):
    assert found["city"] in ("Paris", "Rome", "Oslo") and 1 <= found["days"] <= 7, found


def check_structured_output_chain():
    assert_forecast(create_structured_output_chain(SCHEMA, model, prompt).run(TEXT))


def check_function_chain():
    function = {"name": "forecast", "description": SCHEMA["description"], "parameters": SCHEMA}
    assert_forecast(create_openai_fn_chain([function], model, prompt).run(TEXT))


def check_extraction_chain():
    one = {"properties": SCHEMA["properties"], "required": SCHEMA["required"]}
    found = create_extraction_chain(one, model).run(TEXT)
    assert isinstance(found, list)
    for each in found:
        assert_forecast(each)


if __name__ == "__main__":
    run(globals())
