"""How answers with calls end, in every format that a constraint can write: what a client is told in both ways of
answering, beside thoughts, and where the model itself ends before a call is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_tools_scripted import TEMPLATE, both, rules
from tests.fakes.workers import body_of, worker_for
from tests.unit.parser_samples import WRITERS
from worker.parsers.harmony import Harmony
from worker.parsers.registry import FORMATS
from worker.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio

PARAMETERS = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["s"],
    "additionalProperties": False,
}
GET = {"type": "function", "function": {"name": "get-x.y", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = {"s": '5 é "q" <b>', "n": 3}
CALL, CALL_NOW = ("get-x.y", ARGUMENTS), ("now", {})
NAMED = {"type": "function", "function": {"name": "now"}}
BROKEN_OFF = [
    '<tool_call>{"name": "get-x.y", "arguments": {"s": "aaaa',
    '<tool_call>{"name": "get-x.y", "arguments": {"s": "é", "n": 12',
    '<tool_call>{"name": "get-x.y", "arguments": {"s": {"t": 1}',
]


def constrained(format: str, *calls: tuple[str, Any]) -> str:
    """The calls as a constraint has them written."""
    shape = Harmony.shape if format == "harmony" else FORMATS[format].shape
    assert shape is not None

    def one(name: str, arguments: dict[str, Any]) -> str:
        text = json.dumps(arguments, ensure_ascii=False)
        if shape.parameter is not None:
            before, after = shape.parameter
            values = [(key, v if isinstance(v, str) else json.dumps(v)) for key, v in arguments.items()]
            text = "".join(before.replace("KEY", key) + value + after for key, value in values)
        return shape.before.replace("NAME", name) + text + shape.after

    return shape.first + shape.between.join(one(*call) for call in calls) + shape.last


def calls_of(told: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["name"], json.loads(call["arguments"])) for call in told["tool_calls"]]


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "mistral_v11", "deepseek_v3", "glm45", "kimi_k2", "react"])
async def test_calls_in_every_choice_of_tools(demo_model: Path, format: str) -> None:
    said = {
        "free": WRITERS[format]([CALL]),
        "thinking": "<think>\nhm\n</think>\n\n" + WRITERS[format]([CALL]),
        "must": constrained(format, CALL),
        "now": constrained(format, CALL_NOW),
        "thinking, must": "<think>\nhm\n</think>\n\n" + constrained(format, CALL),
    }
    script = rules(Tokenizer.load(demo_model), {f"{name}!": text for name, text in said.items()})
    environ = {"TOOL_CALL_PARSER": format, "REASONING_PARSER": "qwen3", "CUSTOM_CHAT_TEMPLATE": TEMPLATE}
    with worker_for(demo_model, script=script, STREAM_INTERVAL_MS="0", **environ) as worker:
        for name, choice, calls, finish in [
            ("free", "auto", [CALL], "tool_calls"),
            ("thinking", "auto", [CALL], "tool_calls"),
            ("must", "required", [CALL], "tool_calls"),
            ("now", "required", [CALL_NOW], "tool_calls"),
            ("now", NAMED, [CALL_NOW], "stop"),
            ("thinking, must", "required", [CALL], "tool_calls"),
        ]:
            told = await both(worker, f"{name}!", tools=[GET, NOW], tool_choice=choice)
            assert (calls_of(told), told["finish_reason"], told["raw"]["content"]) == (calls, finish, None), name
            assert told["reasoning_content"] == ("hm" if "thinking" in name else "")


async def test_a_call_that_the_model_broke_off_is_none_to_be_run(demo_model: Path) -> None:
    said = {f"{place}!": text for place, text in enumerate(BROKEN_OFF)}
    said["whole!"] = '<tool_call>{"name": "get-x.y", "arguments": {"s" 1}}</tool_call>'  # but no JSON: to be told of
    script = rules(Tokenizer.load(demo_model), said)
    with worker_for(demo_model, script=script, CUSTOM_CHAT_TEMPLATE=TEMPLATE, STREAM_INTERVAL_MS="0") as worker:
        for place, text in enumerate(BROKEN_OFF):
            told = await both(worker, f"{place}!", tools=[GET])
            assert told["tool_calls"] == [{"name": "get-x.y", "arguments": text.partition('"arguments": ')[2]}]
            assert told["finish_reason"] == "stop"
        assert (await both(worker, "whole!", tools=[GET]))["finish_reason"] == "tool_calls"


async def test_a_form_that_asks_for_calls_is_left_out_where_none_may_come(demo_model: Path) -> None:
    """The demo model's template knows no tools: they would be described with the order to use them."""
    with worker_for(demo_model, script={}) as worker:
        for tools in ({"tools": [NOW]}, {"functions": [NOW["function"]]}):
            prompts = {}
            for choice in ("auto", "none"):
                body = {"messages": [{"role": "user", "content": "Hi"}], **tools}
                body["tool_choice" if "tools" in tools else "function_call"] = choice
                job = {"openai_route": "/v1/chat/completions/render", "openai_input": body}
                prompts[choice] = json.dumps(await body_of(worker, job))
            assert "Action Input" in prompts["auto"] and "Action Input" not in prompts["none"]
            assert "Observation:" not in prompts["none"]
