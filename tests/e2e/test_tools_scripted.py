"""Tool calls and reasoning through the whole path, over an engine that says what the script says: both answers, whole
and streamed, tell the same, under the right finish reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.workers import body_of, chat, error_of, events_of, worker_for
from worker.tokenizer import Tokenizer
from worker.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Shows a tool format and a reasoning format, and nothing else.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Write <tool_call>.{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "c"}]}}</tool_call>'
SAID = {
    "one call": CALL,
    "text and call": f"Sure.\n\n{CALL}",
    "two calls": f"{CALL}\n{CALL}",
    "cut call": CALL[:60],
    "half a call": '<tool_call>{"name": "f", "argu',
    "no tool": '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    "bare json": 'Here is a config: {"name": "f", "arguments": {"x": 1}}',
    "thought and call": f"<think>\nhm\n</think>\n\n{CALL}",
    "thought and talk": f"<think>I could write {CALL} but no</think>done",
    "unclosed thought": "<think>only thoughts and more",
    "opened thought": "step 1</think>\n\n42",
    "half a tag": "<think>not yet </th",
    "plain": "bye <",
    "nothing": "",
    "object behind thoughts": '<think>hm</think>{"a": 1}',
    "object behind opened thoughts": 'hm\n</think>\n\n{"a": 1}',
    "constrained call": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
}
# What a constraint has models write, up to where the token limit cuts it.
CUT = [
    '<tool_call>\n{"name": "f", "arguments": {"a": "wo',
    '<tool_call>\n{"name": "f", "argu',
    '<tool_call>\n{"na',
    "<tool",
]
CUT_REACT = ['Action: f\nAction Input: {"a": "wo', "Action: f\nAction In", "Action: f", "Acti"]
SAID |= {f"forced {number}": text for number, text in enumerate(CUT)}


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def rules(tokenizer: Tokenizer, said: dict[str, str]) -> dict[str, Any]:
    return {
        "rules": [
            {
                "match": ids_of(tokenizer, f"{before}say: {name}"),
                "token_ids": ids_of(tokenizer, text) or [tokenizer.eos_ids[0]],
            }
            for name, text in said.items()
            for before in ("", " ")
        ]
    }


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)


@pytest.fixture(scope="module")
def worker(demo_model: Path, tokenizer: Tokenizer) -> Iterator[Worker]:
    script = rules(tokenizer, SAID)
    with worker_for(demo_model, script=script, CUSTOM_CHAT_TEMPLATE=TEMPLATE, STREAM_INTERVAL_MS="0") as worker:
        yield worker


@pytest.fixture(scope="module")
def react_worker(demo_model: Path, tokenizer: Tokenizer) -> Iterator[Worker]:
    """The demo model's own template knows no tools."""
    said = {
        "act": 'Thought: look\nAction: f\nAction Input: {"a": 1}\nObservation: made up',
        "answer": "Thought: I know\nFinal Answer: 42",
        "broken": "Thought: x\nAction: f\nAction Input: not json",
        **{f"forced {number}": text for number, text in enumerate(CUT_REACT)},
    }
    with worker_for(demo_model, script=rules(tokenizer, said), STREAM_INTERVAL_MS="0") as worker:
        yield worker


def ask(name: str, **body: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": f"say: {name}"}], **{"max_tokens": 400, **body})


def whole(events: list[Any]) -> dict[str, Any]:
    """A streamed choice put together as clients do it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "function_call": None}
    finish = None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            assert (delta.get("reasoning") or "") == (delta.get("reasoning_content") or "")
            for call in delta.get("tool_calls") or []:
                if call.get("id"):
                    assert call["type"] == "function" and call["function"]["arguments"] == ""
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert not call["function"].get("name")
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            if (legacy := delta.get("function_call")) is not None:
                message["function_call"] = message["function_call"] or {"name": "", "arguments": ""}
                message["function_call"]["name"] += legacy.get("name") or ""
                message["function_call"]["arguments"] += legacy.get("arguments") or ""
            finish = choice["finish_reason"] or finish
    return {**message, "finish_reason": finish}


async def both(worker: Worker, name: str, **body: Any) -> dict[str, Any]:
    """What the answer says; asserts that both ways of answering say the same."""
    answer = await body_of(worker, ask(name, **body))
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [{key: call["function"][key] for key in ("name", "arguments")} for call in message.get("tool_calls") or []]
    told = {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": calls,
        "function_call": message.get("function_call"),
        "finish_reason": choice["finish_reason"],
    }
    assert whole(await events_of(worker, ask(name, stream=True, **body))) == told
    return {**told, "raw": message, "usage": answer["usage"]}


class TestCalls:
    async def test_a_call(self, worker: Worker) -> None:
        told = await both(worker, "one call", tools=[F])
        assert told["finish_reason"] == "tool_calls" and told["raw"]["content"] is None
        (call,) = told["raw"]["tool_calls"]
        assert call["type"] == "function" and call["id"].startswith("call_")
        assert json.loads(call["function"]["arguments"]) == {"a": [1, {"b": "c"}]}

    async def test_text_before_a_call(self, worker: Worker) -> None:
        told = await both(worker, "text and call", tools=[F])
        assert told["content"] == "Sure." and len(told["tool_calls"]) == 1

    async def test_several_calls_or_the_first_alone(self, worker: Worker) -> None:
        assert len((await both(worker, "two calls", tools=[F]))["tool_calls"]) == 2
        assert len((await both(worker, "two calls", tools=[F], parallel_tool_calls=False))["tool_calls"]) == 1

    async def test_a_call_cut_by_the_token_limit(self, worker: Worker, tokenizer: Tokenizer) -> None:
        count = len(tokenizer.encode(SAID["cut call"], add_special_tokens=False))
        told = await both(worker, "cut call", tools=[F], max_tokens=count)
        assert told["finish_reason"] == "length" and len(told["tool_calls"]) == 1

    async def test_a_call_cut_by_a_stop_string_is_none_to_be_run(self, worker: Worker) -> None:
        told = await both(worker, "one call", tools=[F], stop=['"b"'])
        assert told["finish_reason"] == "stop" and told["tool_calls"] == [{"name": "f", "arguments": '{"a": [1, {'}]
        told = await both(worker, "one call", tools=[F], stop=["</tool_call>"])
        assert told["finish_reason"] == "tool_calls" and json.loads(told["tool_calls"][0]["arguments"])

    @pytest.mark.parametrize("name", ["half a call", "no tool", "bare json", "plain"])
    async def test_what_is_no_call_is_text(self, worker: Worker, name: str) -> None:
        told = await both(worker, name, tools=[F])
        assert told["content"] == SAID[name] and not told["tool_calls"] and told["finish_reason"] == "stop"

    async def test_without_tools_markup_is_text(self, worker: Worker) -> None:
        for body in ({}, {"tools": [F], "tool_choice": "none"}):
            assert (await both(worker, "one call", **body))["content"] == CALL

    async def test_the_dialect_of_functions(self, worker: Worker) -> None:
        told = await both(worker, "two calls", functions=[F["function"]])
        assert told["finish_reason"] == "function_call" and not told["tool_calls"]
        assert told["function_call"]["name"] == "f" and json.loads(told["function_call"]["arguments"])

    async def test_results_go_back_in(self, worker: Worker) -> None:
        first = (await both(worker, "one call", tools=[F]))["raw"]
        messages = [
            {"role": "user", "content": "call it"},
            {"role": "assistant", "content": None, "tool_calls": first["tool_calls"]},
            {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "say: plain"},
        ]
        answer = await body_of(worker, chat(messages=messages, tools=[F], max_tokens=50))
        assert answer["choices"][0]["message"]["content"] == "bye <"

    async def test_several_choices(self, worker: Worker) -> None:
        answer = await body_of(worker, ask("one call", tools=[F], n=3))
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
        assert len(set(ids)) == 3 and all(choice["finish_reason"] == "tool_calls" for choice in answer["choices"])


NAMED = {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "f"}}}
REQUIRED = {"tools": [F], "tool_choice": "required"}
LEGACY = {"functions": [F["function"]], "function_call": {"name": "f"}}


class TestCutForcedCalls:
    """The token limit ends a call that must come (the script writes what the constraint would)."""

    @pytest.mark.parametrize("body", [NAMED, REQUIRED, LEGACY], ids=["named", "required", "legacy"])
    @pytest.mark.parametrize(
        ("number", "call"),
        [(0, {"name": "f", "arguments": '{"a": "wo'}), (1, {"name": "f", "arguments": ""}), (2, None), (3, None)],
        ids=["within arguments", "behind the name", "before the name", "within the tag"],
    )
    async def test_hermes(self, tokenizer: Tokenizer, worker: Worker, body: Any, number: int, call: Any) -> None:
        told = await both(worker, f"forced {number}", max_tokens=len(ids_of(tokenizer, CUT[number])), **body)
        self.check(told, body, call)

    @pytest.mark.parametrize("body", [NAMED, REQUIRED, LEGACY], ids=["named", "required", "legacy"])
    @pytest.mark.parametrize(
        ("number", "call"),
        [(0, {"name": "f", "arguments": '{"a": "wo'}), (1, {"name": "f", "arguments": ""}), (2, None), (3, None)],
        ids=["within arguments", "behind the name", "within the name", "before the name"],
    )
    async def test_react(self, tokenizer: Tokenizer, react_worker: Worker, body: Any, number: int, call: Any) -> None:
        count = len(ids_of(tokenizer, CUT_REACT[number]))
        self.check(await both(react_worker, f"forced {number}", max_tokens=count, **body), body, call)

    def check(self, told: dict[str, Any], body: Any, call: Any) -> None:
        assert told["finish_reason"] == "length" and told["raw"]["content"] is None
        if body is LEGACY:
            assert told["function_call"] == call and "tool_calls" not in told["raw"]
        else:
            assert told["tool_calls"] == ([call] if call else []) and "function_call" not in told["raw"]


class TestFirstChunk:
    """Its content: text begins with "", a call with null, as in the whole answer."""

    @pytest.mark.parametrize(
        ("name", "body", "content"),
        [
            ("plain", {}, ""),
            ("plain", {"tools": [F]}, ""),
            ("text and call", {"tools": [F]}, ""),
            ("one call", {"tools": [F]}, None),
            ("one call", {"tools": [F], "logprobs": True, "n": 2}, None),
            ("constrained call", NAMED, None),
            ("constrained call", REQUIRED, None),
            ("constrained call", LEGACY, None),
            ("one call", {"functions": [F["function"]]}, None),
            ("thought and call", {"tools": [F]}, None),
            ("nothing", {"tools": [F]}, ""),
        ],
    )
    async def test_content(self, worker: Worker, name: str, body: Any, content: str | None) -> None:
        events = await events_of(worker, ask(name, stream=True, **body))
        for index in range(body.get("n", 1)):
            mine = [c for event in events for c in event["choices"] if c["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": content, "refusal": None}
            assert not any("role" in choice["delta"] for choice in mine[1:])
            if content is None:
                assert not any("content" in choice["delta"] for choice in mine[1:])
        answer = await body_of(worker, ask(name, **body))
        assert (answer["choices"][0]["message"]["content"] is None) == (content is None)

    async def test_logprobs_of_the_tokens_before_it_are_told(self, worker: Worker) -> None:
        body = {"tools": [F], "logprobs": True, "return_token_ids": True}
        answer = (await body_of(worker, ask("one call", **body)))["choices"][0]
        events = await events_of(worker, ask("one call", stream=True, **body))
        choices = [choice for event in events for choice in event["choices"]]
        entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == answer["logprobs"]["content"]
        assert [i for c in choices for i in c.get("token_ids") or []] == answer["token_ids"]


class TestReasoning:
    async def test_thoughts_then_a_call(self, worker: Worker) -> None:
        told = await both(worker, "thought and call", tools=[F])
        assert told["reasoning_content"] == "hm" and told["content"] == "" and len(told["tool_calls"]) == 1
        assert told["raw"]["reasoning"] == "hm"
        assert 0 < told["usage"]["completion_tokens_details"]["reasoning_tokens"] < told["usage"]["completion_tokens"]

    async def test_talk_of_calls_is_no_call(self, worker: Worker) -> None:
        told = await both(worker, "thought and talk", tools=[F])
        assert told["content"] == "done" and CALL in told["reasoning_content"] and not told["tool_calls"]

    async def test_thoughts_cut_by_the_token_limit(self, worker: Worker, tokenizer: Tokenizer) -> None:
        count = len(tokenizer.encode(SAID["unclosed thought"], add_special_tokens=False))
        told = await both(worker, "unclosed thought", max_tokens=count)
        assert told["finish_reason"] == "length" and told["raw"]["content"] is None
        assert told["reasoning_content"] == "only thoughts and more"
        usage = told["usage"]
        assert usage["completion_tokens"] == count >= usage["completion_tokens_details"]["reasoning_tokens"] > 0

    async def test_a_block_that_the_prompt_opened(self, worker: Worker) -> None:
        told = await both(worker, "opened thought", chat_template_kwargs={"enable_thinking": True})
        assert told["reasoning_content"] == "step 1" and told["content"] == "42"
        told = await both(worker, "opened thought")
        assert told["reasoning_content"] == "" and told["content"] == SAID["opened thought"]

    async def test_half_a_tag_at_the_end(self, worker: Worker) -> None:
        assert (await both(worker, "half a tag"))["reasoning_content"] == "not yet </th"

    async def test_reasoning_can_be_left_out(self, worker: Worker) -> None:
        told = await both(worker, "thought and call", tools=[F], include_reasoning=False)
        assert told["reasoning_content"] == "" and len(told["tool_calls"]) == 1

    @pytest.mark.parametrize("tools", [{}, {"tools": [F]}])
    @pytest.mark.parametrize("thinking", [False, True])
    async def test_a_schema_begins_behind_them(self, worker: Worker, tools: Any, thinking: bool) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, **tools}
        name = "object behind opened thoughts" if thinking else "object behind thoughts"
        told = await both(worker, name, chat_template_kwargs={"enable_thinking": thinking}, **body)
        assert (told["reasoning_content"], told["content"], told["finish_reason"]) == ("hm", '{"a": 1}', "stop")


class TestReAct:
    async def test_an_action_is_a_call(self, react_worker: Worker) -> None:
        told = await both(react_worker, "act", tools=[F])
        assert told["tool_calls"] == [{"name": "f", "arguments": '{"a": 1}'}]
        assert told["finish_reason"] == "tool_calls" and "Observation" not in told["content"]

    async def test_in_the_dialect_of_functions(self, react_worker: Worker) -> None:
        told = await both(react_worker, "act", functions=[F["function"]])
        assert told["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
        assert told["finish_reason"] == "function_call"

    @pytest.mark.parametrize(("name", "part"), [("answer", "Final Answer: 42"), ("broken", "Action Input: not json")])
    async def test_everything_else_is_text(self, react_worker: Worker, name: str, part: str) -> None:
        told = await both(react_worker, name, tools=[F])
        assert part in told["content"] and told["finish_reason"] == "stop"


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "param"),
        [
            (
                {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
                "tool_choice.function.name",
            ),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [F], "tool_choice": "sometimes"}, "tool_choice"),
            ({"guided_regex": "["}, "guided_regex"),
            ({"structured_outputs": {"zzz": 1}}, "structured_outputs.zzz"),
            ({"chat_template_kwargs": {"range": 5}}, "chat_template_kwargs.range"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}}, "response_format"),
        ],
    )
    async def test_by_name(self, worker: Worker, body: dict[str, Any], param: str) -> None:
        error = await error_of(worker, ask("plain", **body))
        assert error["status"] == 400 and error["param"] == param
        assert (await both(worker, "plain"))["content"] == "bye <"

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"guided_regex": "[0-9]+"}, "guided_regex"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice"),
            (REQUIRED, "tools"),
            (LEGACY, "functions"),
        ],
    )
    async def test_an_output_that_leaves_its_grammar(self, worker: Worker, body: dict[str, Any], param: str) -> None:
        """Which only this engine can write: what fails while it is made names the field, too."""
        for stream in (False, True):
            error = await error_of(worker, ask("plain", stream=stream, **body))
            assert (error["param"], error["code"]) == (param, "invalid_grammar"), error
        assert (await both(worker, "plain"))["content"] == "bye <"

    @pytest.mark.parametrize("parameters", [{"properties": {"a": {"type": "something"}}}, {"properties": {"a": "red"}}])
    async def test_a_broken_schema_of_a_tool(self, worker: Worker, parameters: Any) -> None:
        broken = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        error = await error_of(worker, ask("plain", tools=[broken], tool_choice="required"))
        assert error["status"] == 400 and error["param"] == "tools[0].function.parameters"
        assert (await both(worker, "one call", tools=[broken]))["finish_reason"] == "tool_calls"
