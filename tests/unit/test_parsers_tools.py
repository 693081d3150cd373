"""Formats of tool calls, case by case: what models get wrong, and what must not be taken for a call."""

from __future__ import annotations

import json

import pytest

from tests.unit.parser_samples import TOOLS, parse, said, tools_in
from worker.parsers.base import ToolCallArgs, ToolCallStart
from worker.parsers.registry import tool_parser


def one(format: str, text: str) -> tuple[str, object]:
    """The only thing in an output: a call."""
    content, _, calls = tools_in(format, text)
    assert content == "" and len(calls) == 1
    return calls[0][0], json.loads(calls[0][1])


def test_id_and_name_come_once_and_arguments_start_empty() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Lyon, Rhone"}}</tool_call>'
    parser = tool_parser("hermes", TOOLS)
    deltas = [delta for char in text for delta in parser.feed(char)] + parser.close()
    assert [type(delta) for delta in deltas].count(ToolCallStart) == 1
    assert isinstance(deltas[0], ToolCallStart) and deltas[0].name == "get_weather"
    assert all(isinstance(delta, ToolCallArgs) for delta in deltas[1:])


def test_ids_differ_and_have_the_formats_form() -> None:
    calls = '[TOOL_CALLS][{"name":"f","arguments":{}},{"name":"f","arguments":{}}]'
    ids = [
        delta.id for delta in parse(lambda: tool_parser("mistral", TOOLS), [calls]) if isinstance(delta, ToolCallStart)
    ]
    assert len(set(ids)) == 2 and all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    kimi = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    (start, _) = parse(lambda: tool_parser("kimi_k2", TOOLS), [kimi])
    assert isinstance(start, ToolCallStart) and start.id == "functions.f:3"
    (start, _) = parse(lambda: tool_parser("hermes", TOOLS), ['<tool_call>{"name":"f","arguments":{}}</tool_call>'])
    assert isinstance(start, ToolCallStart) and start.id.startswith("call_")


class TestHermes:
    def test_json_without_tags_is_no_call(self) -> None:
        for text in (
            'Here is a config: {"name": "rex", "arguments": {"x": 1}}',
            'Here is a config: {"name": "f", "arguments": {"x": 1}}',
        ):
            assert tools_in("hermes", text) == (text, "", [])

    def test_arguments_cut_by_the_length(self) -> None:
        text = '<tool_call>{"name": "f", "arguments": {"text": "aaaa'
        assert tools_in("hermes", text) == ("", "", [("f", '{"text": "aaaa')])

    @pytest.mark.parametrize(
        ("text", "arguments"),
        [
            ('<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', {"n": 1}),
            ('<tool_call>{"name": "f", "parameters": {"n": 1}}</tool_call>', {"n": 1}),
            ('<tool_call>{"name": "f"}</tool_call>', {}),
            ('<tool_call>{"name": "f", "arguments": null}</tool_call>', {}),
            ('<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', {"n": 1}),
            ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}</tool_call>', {"n": 1}),
            ('<tool_call>{"name": "f", "arguments": {"n": 1}}}</tool_call>', {"n": 1}),
            ('<tool_call>{"name": "f", "arguments": {"n": 1}</tool_call>', {"n": 1}),
            ('<tool_call>{"name": "f", "arguments": {"object": {"a": [1</tool_call>', {"object": {"a": [1]}}),
            ('<tool_call>{"name": "f", "arguments": {"n": 1}}', {"n": 1}),
            ('<tool_call>{"name": "f", "arguments": {"text": "a\nb\tc"}}</tool_call>', {"text": "a\nb\tc"}),
            ('<tool_call>{"name": "f", "arguments": {"text": "</tool_call>"}}</tool_call>', {"text": "</tool_call>"}),
            ('<tool_call>{"name": "f", "arguments": {"text": "\\q"}}</tool_call>', {"text": "\\q"}),
        ],
    )
    def test_calls_that_are_almost_right(self, text: str, arguments: object) -> None:
        assert one("hermes", text) == ("f", arguments)

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>",
            '<tool_call>{"name": "f"',
            "<tool_call>not json</tool_call>",
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "no json"}</tool_call>',
            '<tool_call>{"arguments": {"n": 1}}</tool_call>',
            "text with <tool_cal",
        ],
    )
    def test_what_is_no_call_is_text(self, text: str) -> None:
        assert tools_in("hermes", text) == (text, "", [])

    def test_a_good_call_behind_a_broken_one(self) -> None:
        text = '<tool_call>oops <tool_call>{"name": "f", "arguments": {}}</tool_call>'
        content, _, calls = tools_in("hermes", text)
        assert content == "<tool_call>oops" and calls == [("f", "{}")]

    def test_nothing_of_the_start_tag_leaks(self) -> None:
        parser = tool_parser("hermes", TOOLS)
        streamed = said([d for c in 'Hi <tool_call>{"name": "f", "arguments": {}}</tool_call>' for d in parser.feed(c)])
        assert "<" not in streamed[0]


class TestLlama:
    def test_a_call_and_prose_behind_it(self) -> None:
        text = '{"type": "function", "name": "f", "parameters": {}}\n\nWant more?'
        content, _, calls = tools_in("llama3_json", text)
        assert calls == [("f", "{}")] and content.strip() == "Want more?"

    @pytest.mark.parametrize(
        "text", ['One entry: {"name": "Rex"}', '{"name": "f"}', '{"name": "Rex", "parameters": {}}']
    )
    def test_json_that_is_no_call(self, text: str) -> None:
        assert tools_in("llama3_json", text) == (text, "", [])

    def test_the_python_tag(self) -> None:
        assert one("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"n": 1}}') == ("f", {"n": 1})
        text = '<|python_tag|>brave_search.call(query="x")'
        assert tools_in("llama3_json", text) == (text, "", [])


class TestTypedParameters:
    @pytest.mark.parametrize(
        ("key", "text", "value"),
        [
            ("n", "5", 5),
            ("n", " 5 ", 5),
            ("n", "five", "five"),
            ("text", "5", "5"),
            ("text", "true", "true"),
            ("text", " two  spaces ", " two  spaces "),
            ("x", "1.5", 1.5),
            ("x", "None", None),
            ("x", "NaN", "NaN"),
            ("flag", "True", True),
            ("flag", "false", False),
            ("list", "['a', 1]", ["a", 1]),
            ("object", '{"a": {"b": null}}', {"a": {"b": None}}),
            ("object", "{'a': True}", {"a": True}),
            ("unit", "km", "km"),
            ("any", "12", 12),
            ("any", "twelve", "twelve"),
            ("undeclared", "x", "x"),
            ("undeclared", "[1]", [1]),
            ("n", "1" * 5000, "1" * 5000),
            ("list", "[" * 3000, "[" * 3000),
        ],
    )
    def test_by_the_schema(self, key: str, text: str, value: object) -> None:
        call = f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
        assert one("qwen3_coder", call) == ("f", {key: value})

    def test_without_the_outer_tag_and_with_ends_left_out(self) -> None:
        assert one("qwen3_coder", "<function=f>\n<parameter=n>\n5\n</parameter>\n</function>") == ("f", {"n": 5})
        text = "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=n>\n3\n</parameter>\n</tool_call>"
        assert one("qwen3_coder", text) == ("f", {"text": "a", "n": 3})

    def test_lines_within_a_value_stay(self) -> None:
        text = "<function=f>\n<parameter=text>\n\n  def a():\n    pass\n\n</parameter>\n</function>"
        assert one("qwen3_coder", text) == ("f", {"text": "\n  def a():\n    pass\n"})

    def test_glm_without_new_lines_and_without_arguments(self) -> None:
        text = "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call><tool_call>get_weather</tool_call>"
        content, _, calls = tools_in("glm45", text)
        assert content == "" and calls == [("f", '{"n": 1}'), ("get_weather", "{}")]


class TestOthers:
    def test_deepseek_reads_both_forms(self) -> None:
        old = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"n": 1}\n```<｜tool▁call▁end｜>'
        new = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
        for format in ("deepseek_v3", "deepseek_v31"):
            assert one(format, old) == one(format, new) == ("f", {"n": 1})

    def test_mistral_reads_all_forms(self) -> None:
        for text in (
            '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}]',
            '[TOOL_CALLS] {"name": "f", "arguments": {"n": 1}}',
            '[TOOL_CALLS]f[ARGS]{"n": 1}',
            '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"n": 1}',
            '[TOOL_CALLS]f{"n": 1}',
        ):
            assert one("mistral", text) == ("f", {"n": 1})

    def test_an_unknown_tool_among_known_ones(self) -> None:
        text = (
            '<|tool_call|>[{"name":"f","arguments":{}},{"name":"no","arguments":{}},{"name":"f","arguments":{"n":2}}]'
        )
        content, _, calls = tools_in("granite", text)
        assert content == ',{"name":"no","arguments":{}}' and calls == [("f", "{}"), ("f", '{"n":2}')]

    @pytest.mark.parametrize(
        "text", ["[1, 2, 3]", "[f]", "[f(", "[f(a=b)]", "[f(a=open('x'))]", "[f(**x)]", "[unknown(a=1)]"]
    )
    def test_lists_and_code_that_are_no_calls(self, text: str) -> None:
        assert tools_in("pythonic", text) == (text, "", [])

    def test_positional_arguments_go_by_the_schemas_order(self) -> None:
        assert one("pythonic", "[f('a', 2, flag=true)]") == ("f", {"text": "a", "n": 2, "flag": True})

    def test_the_word_functools_is_no_call(self) -> None:
        text = "import functools\nfunctools.reduce(f, [1])"
        assert tools_in("phi4_mini", text) == (text, "", [])

    def test_fallback_reads_a_list_at_the_beginning_only(self) -> None:
        text = 'See [{"name": "f", "arguments": {}}]'
        assert tools_in("json", text) == (text, "", [])


class TestReAct:
    def test_thought_action_input_observation(self) -> None:
        text = 'Thought: look it up\nAction: f\nAction Input: {"n": 1}\nObservation: made up'
        content, _, calls = tools_in("react", text)
        assert calls == [("f", '{"n": 1}')] and content.startswith("Thought: look it up")

    def test_fenced_and_many_lines(self) -> None:
        assert one("react", 'Action: f\nAction Input: ```json\n{"n": 1}\n```') == ("f", {"n": 1})
        assert one("react", 'Action: f\nAction Input:\n{\n "n": 1\n}\n') == ("f", {"n": 1})

    @pytest.mark.parametrize(
        "text",
        [
            "Thought: x\nAction: f\nAction Input: not json",
            "Thought: x\nAction: unknown\nAction Input: {}",
            "Thought: x\nAction: f",
            "Thought: done\nFinal Answer: 42",
            "Reaction: none\nAction",
            'Thought: x\nAction: f\nAction Input: {"n": ',
        ],
    )
    def test_what_cannot_be_parsed_comes_out_as_text(self, text: str) -> None:
        assert tools_in("react", text) == (text, "", [])

    def test_the_start_of_an_action_is_held_back(self) -> None:
        parser = tool_parser("react", TOOLS)
        shown = said([delta for char in "Thought: hm\nAction: f" for delta in parser.feed(char)])
        assert shown == ("Thought: hm", "", [])


class TestHarmony:
    def test_thoughts_preamble_calls_and_answer(self) -> None:
        text = (
            "<|channel|>analysis<|message|>let me see<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>'
        )
        assert tools_in("harmony", text) == ("I will look.", "let me see", [("f", '{"n": 1}')])
        answer = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
        assert tools_in("harmony", answer) == ("b", "a", [])

    def test_the_recipient_before_the_channel(self) -> None:
        text = " to=functions.f<|channel|>commentary json<|message|>{}"
        assert tools_in("harmony", text) == ("", "", [("f", "{}")])

    def test_arguments_that_are_no_object(self) -> None:
        head = "<|channel|>commentary to=functions.f<|message|>"
        assert tools_in("harmony", head + "<|call|>") == ("", "", [("f", "{}")])
        assert tools_in("harmony", head + " code()<|call|>") == (" code()", "", [])

    def test_plain_text_and_a_cut_header(self) -> None:
        assert tools_in("harmony", "plain text") == ("plain text", "", [])
        assert tools_in("harmony", "<|channel|>anal") == ("", "", [])
        assert tools_in("harmony", "<|channel|>analysis<|message|>hm<|end|><|start|>assi") == ("", "hm", [])

    def test_the_cut_header_of_a_call(self) -> None:
        """A name that may go on is text, one that is whole a call."""
        header = "<|channel|>commentary to=functions.f"
        assert tools_in("harmony", header) == ("commentary to=functions.f", "", [])
        for more in (" ", " <|constrain|>", " <|constrain|>json<|mess", " <|constrain|>json<|message|>"):
            assert tools_in("harmony", header + more) == ("", "", [("f", "")]), more
        assert tools_in("harmony", header + " <|constrain|>json<|message|>{") == ("", "", [("f", "{")])
