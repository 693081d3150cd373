"""Arguments of calls: values typed by the schema, new lines around them, JSON that is almost right, none at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.parser_samples import WRITERS, always
from worker.parsers.registry import tool_parser

NESTED = {
    "allOf": [{"$ref": "#/$defs/base"}],
    "anyOf": [{"properties": {"code": {"type": "string"}}}, {"properties": {"mode": {"enum": ["none", None]}}}],
    "$defs": {"base": {"properties": {"id": {"type": "string"}}}},
}
FLAT = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "mode": {"enum": ["none", "auto", "null", "5", None, 5]},
        "optional": {"anyOf": [{"$ref": "#/$defs/mode"}, {"type": "null"}]},
        "count": {"type": ["integer", "null"]},
    },
    "$defs": {"mode": {"type": "string", "enum": ["None", "low"]}},
}
TOOLS: dict[str, Any] = {"f": FLAT, "nested": NESTED, "ns:tool.get-x": None, "now": None}
TAGGED = ("qwen3_coder", "glm45", "minimax_m2", "seed_oss", "muse_glimmer", "minicpm5")


def call(format: str, text: str) -> tuple[str, Any]:
    """The only thing in an output: a call, whose arguments are JSON."""
    content, _, calls = always(lambda: tool_parser(format, TOOLS), text)
    assert content == "" and len(calls) == 1, (content, calls)
    return calls[0][0], json.loads(calls[0][1])


class TestTyping:
    @pytest.mark.parametrize(
        ("key", "text", "value"),
        [
            ("maybe", "null", None),
            ("maybe", "None", None),
            ("maybe", "none", "none"),
            ("maybe", "NULL", "NULL"),
            ("count", "none", None),
            ("mode", "none", "none"),
            ("mode", "null", "null"),
            ("mode", "5", "5"),
            ("optional", "None", "None"),
            ("optional", "null", None),
        ],
    )
    def test_a_word_that_the_schema_names_or_allows_is_that_word(self, key: str, text: str, value: object) -> None:
        for format in TAGGED:
            assert call(format, WRITERS[format]([("f", {key: text})])) == ("f", {key: value})

    @pytest.mark.parametrize(("key", "text"), [("id", "5"), ("code", "true"), ("mode", "none")])
    def test_arguments_declared_in_parts_of_the_schema(self, key: str, text: str) -> None:
        for format in TAGGED:
            assert call(format, WRITERS[format]([("nested", {key: text})])) == ("nested", {key: text})

    @pytest.mark.parametrize("format", TAGGED)
    @pytest.mark.parametrize("text", ["def f():\n    pass\n", "a\n\n", "no end", "  padded  ", ""])
    def test_the_new_line_at_the_end_of_a_text_stays(self, format: str, text: str) -> None:
        assert call(format, WRITERS[format]([("f", {"text": text})])) == ("f", {"text": text})

    @pytest.mark.parametrize("format", TAGGED)
    def test_a_value_on_lines_of_its_own_is_without_them(self, format: str) -> None:
        output = WRITERS[format]([("f", {"text": "Paris"})])
        assert call(format, output.replace("Paris", "\nParis\n").replace("\n\n", "\n")) == ("f", {"text": "Paris"})


class TestAlmostJson:
    @pytest.mark.parametrize(
        ("written", "meant"),
        [
            ('{"a": 1,}', {"a": 1}),
            ('{"a": [1, 2,\n ],\n}', {"a": [1, 2]}),
            ('{"a": True, "b": [False, None]}', {"a": True, "b": [False, None]}),
            ('{"a": "True, None,}"}', {"a": "True, None,}"}),
            ('{"True": {"b": None,},}', {"True": {"b": None}}),
            ('{"a": -1.5e+3,"b":true}', {"a": -1500.0, "b": True}),
        ],
    )
    def test_is_repaired(self, written: str, meant: object) -> None:
        for output in (
            f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>',
            f'<tool_call>{{"arguments": {written}, "name": "f",}}</tool_call>',
        ):
            assert call("hermes", output) == ("f", meant)
        assert call("mistral_v11", f"[TOOL_CALLS]f[ARGS]{written}") == ("f", meant)

    def test_a_comma_before_the_end_of_a_call_whose_bracket_is_missing(self) -> None:
        assert call("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,</tool_call>') == ("f", {"a": 1})

    @pytest.mark.parametrize("cut", ['{"a": Tru', '{"a": 1,', '{"a": 1, ', '{"a": 12'])
    def test_what_is_cut_comes_out_as_it_is(self, cut: str) -> None:
        text = f'<tool_call>{{"name": "f", "arguments": {cut}'
        assert always(lambda: tool_parser("hermes", TOOLS), text) == ("", "", [("f", cut)])


class TestNoArguments:
    @pytest.mark.parametrize(
        ("format", "text"),
        [
            ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>'),
            ("hermes", '<tool_call>{"name": "now", "arguments": []}</tool_call>'),
            ("hermes", '<tool_call>{"arguments": " ", "name": "now"}</tool_call>'),
            ("hermes", '<tool_call>{"name": "now", "arguments": </tool_call>'),
            ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>"),
            ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>"),
            ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n\n```<｜tool▁call▁end｜>"),
            ("react", "Action: now\nAction Input: None\n"),
            ("react", "Action: now\nAction Input: null"),
        ],
    )
    def test_are_an_empty_object(self, format: str, text: str) -> None:
        assert call(format, text) == ("now", {})


@pytest.mark.parametrize("format", WRITERS)
def test_names_of_all_allowed_characters(format: str) -> None:
    assert call(format, WRITERS[format]([("ns:tool.get-x", {})])) == ("ns:tool.get-x", {})
