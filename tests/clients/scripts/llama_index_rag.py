"""LlamaIndex: structured prediction, and questions over a handful of documents (retrieval, then an answer).

The embeddings are as small as can be: the mean of the model's own token embeddings, with the token ids from /tokenize.
"""

import json
import math
import urllib.request
from pathlib import Path
from typing import Literal

import numpy
from harness import API_KEY, BASE_URL, MODEL, MODEL_DIR, run
from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

DOCUMENTS = {
    "bees": "Bees collect nectar from flowers. In the hive they turn it into honey.",
    "volcano": "A volcano is a mountain through which lava, ash and hot gas leave the inside of the earth.",
    "chess": "Chess is a board game for two players. Each has a king, a queen, rooks, bishops, knights and pawns.",
    "bread": "Bread is made of flour, water, salt and yeast. The dough rises before it is baked in the oven.",
}


class Forecast(BaseModel):
    """The weather of the next days."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=7)


def language_model(**options):
    settings = {
        "model": MODEL,
        "api_base": BASE_URL,
        "api_key": API_KEY,
        "is_chat_model": True,
        "context_window": 8192,
        "max_tokens": 80,
        "temperature": 0,
        "max_retries": 0,
        "timeout": 120,
    }
    return OpenAILike(**{**settings, **options})


def token_embeddings():
    """float32 [vocabulary, width] from the checkpoint's bfloat16 (see the safetensors format: size, JSON, data)."""
    data = (Path(MODEL_DIR) / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])["model.embed_tokens.weight"]
    assert entry["dtype"] == "BF16"
    start, end = (8 + size + offset for offset in entry["data_offsets"])
    halves = numpy.frombuffer(data[start:end], dtype=numpy.uint16)
    return (halves.astype(numpy.uint32) << 16).view(numpy.float32).reshape(entry["shape"])


EMBEDDINGS = token_embeddings()
EMBEDDINGS = EMBEDDINGS / numpy.linalg.norm(EMBEDDINGS, axis=1, keepdims=True)  # else frequent tokens say it all


def tokenize(text):
    body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + API_KEY}
    url = BASE_URL.removesuffix("/v1") + "/tokenize"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return json.load(answer)["tokens"]


class MeanOfTokens(BaseEmbedding):
    def _get_text_embedding(self, text):
        mean = EMBEDDINGS[tokenize(text)].mean(axis=0)
        return (mean / math.sqrt(mean @ mean)).tolist()

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


def check_structured_predict_by_tools():
    model = language_model(is_function_calling_model=True)
    prompt = PromptTemplate("How is the weather in {city} this week?")
    assert isinstance(model.structured_predict(Forecast, prompt, city="Rome"), Forecast)


def check_structured_predict_by_json_schema():
    model = language_model(should_use_structured_outputs=True)
    prompt = PromptTemplate("How is the weather in {city} this week?")
    assert isinstance(model.structured_predict(Forecast, prompt, city="Rome"), Forecast)


def check_streamed_structured_predict():
    # Not by tools: there LlamaIndex leaves the choice to the model when it streams, and a small one calls nothing.
    model = language_model(should_use_structured_outputs=True)
    prompt = PromptTemplate("How is the weather in {city} this week?")
    *_, last = model.stream_structured_predict(Forecast, prompt, city="Rome")
    assert isinstance(last, Forecast) and last == model.structured_predict(Forecast, prompt, city="Rome")


def check_required_tool():
    def forecast(city: Literal["Paris", "Rome", "Oslo"]) -> str:
        """The weather of the next days."""
        return "sun in " + city

    model = language_model(is_function_calling_model=True)
    answer = model.predict_and_call(
        [FunctionTool.from_defaults(forecast)], user_msg="How is the weather in Rome?", tool_required=True
    )
    assert answer.response.startswith("sun in ")


def check_question_over_documents():
    documents = [Document(text=text, metadata={}, doc_id=name) for name, text in DOCUMENTS.items()]
    index = VectorStoreIndex.from_documents(documents, embed_model=MeanOfTokens())
    model = language_model(max_tokens=40)
    engine = index.as_query_engine(llm=model, similarity_top_k=1)
    for question, name in (("What do bees make?", "bees"), ("What is bread made of?", "bread")):
        answer = engine.query(question)
        assert [node.node.ref_doc_id for node in answer.source_nodes] == [name]
        assert answer.response.strip() and answer.response != "Empty Response"
    streaming = index.as_query_engine(llm=model, similarity_top_k=1, streaming=True)
    assert "".join(streaming.query("What do bees make?").response_gen) == engine.query("What do bees make?").response


if __name__ == "__main__":
    run(globals())
