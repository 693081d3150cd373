"""What requests ask of an answer: refused with the field's name, or kept by every output that the grammar lets through.

The outputs are random ones: the grammar, driven by a random sampler over a real tokenizer, is all that shapes them.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest

from engine.grammar import Grammar
from engine.messages import GrammarSpec
from templates import Rendered
from tests.unit.grammar_driver import GrammarDriver
from tests.unit.parser_samples import Said, said
from worker.errors import BadRequest
from worker.parsers.base import ToolCallStart, merge
from worker.parsers.names import HARMONY
from worker.parsers.registry import FORMATS, Formats, formats
from worker.prompts import Prompt
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest
from worker.structured import OutputFormats, OutputPlan
from worker.tokenizer import Tokenizer

# Special tokens of the demo model, renamed: a tokenizer that has the markers of some formats as special tokens.
RENAMED = {
    "<repo_name>": "<|channel|>",
    "<reponame>": "<|message|>",
    "<file_sep>": "<|start|>",
    "<filename>": "<|end|>",
    "<gh_stars>": "<|call|>",
    "<issue_start>": "<|constrain|>",
    "<issue_comment>": "<|return|>",
    "<issue_closed>": "[TOOL_CALLS]",
    "<jupyter_start>": "<|tool_call_begin|>",
    "<jupyter_text>": "<|tool_call_argument_begin|>",
    "<jupyter_code>": "<|tool_call_end|>",
    "<jupyter_output>": "</think>",
    "<jupyter_script>": "<think>",
}
PING = {
    "type": "object",
    "properties": {"word": {"type": "string", "enum": ["blue"]}},
    "required": ["word"],
    "additionalProperties": False,
}
TRIP = {
    "type": "object",
    "properties": {
        "to": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "by": {"enum": ["train", "bus"]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
        "name": {"type": ["boolean", "null"]},
    },
    "required": ["to", "days"],
    "additionalProperties": False,
    "$defs": {
        "stop": {
            "type": "object",
            "properties": {"at": {"type": "integer", "maximum": 9}},
            "required": ["at"],
            "additionalProperties": False,
        }
    },
}
ANSWER = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "maxProperties": 0}
SCHEMAS: dict[str, Any] = {"ping": PING, "trip": TRIP, "now": None}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}


@cache
def folder(renamed: bool) -> Path:
    import tempfile

    from builder.demo_model import ensure

    if not renamed:
        return ensure()
    text = (ensure() / "tokenizer.json").read_text()
    for old, new in RENAMED.items():
        assert json.dumps(old) in text
        text = text.replace(json.dumps(old), json.dumps(new))
    made = Path(tempfile.mkdtemp())
    (made / "tokenizer.json").write_text(text)
    return made


@cache
def driver(renamed: bool) -> GrammarDriver:
    return GrammarDriver(folder(renamed))


@cache
def tokenizer(renamed: bool) -> Tokenizer:
    return Tokenizer.load(folder(renamed))


def tools(*names: str, strict: bool = False) -> list[dict[str, Any]]:
    made = []
    for name in names or ("ping", "trip", "now"):
        function: dict[str, Any] = {"name": name, "strict": strict}
        if SCHEMAS[name] is not None:
            function["parameters"] = SCHEMAS[name]
        made.append({"type": "function", "function": function})
    return made


def plan(
    tool: str | None = None,
    reasoning: str | None = None,
    *,
    prompt: str = "",
    react: bool = False,
    renamed: bool = False,
    **body: Any,
) -> OutputPlan:
    request = ChatCompletionRequest.parse({"messages": [{"role": "user", "content": "Hi"}], **body})
    rendered = Rendered(text=prompt, pieces=(), source="test", react=react)
    outputs = OutputFormats(Formats(tool, reasoning), tokenizer(renamed))
    return asyncio.run(outputs.plan(request, Prompt((1,), prompt, rendered=rendered)))


def refusal(tool: str | None = "hermes", reasoning: str | None = None, prompt: str = "", **body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        plan(tool, reasoning, prompt=prompt, **body)
    return refused.value


def grammar(made: OutputPlan, renamed: bool = False) -> Grammar:
    assert made.grammar is not None
    return driver(renamed).compiler.compile(made.grammar)


def read(made: OutputPlan, text: str) -> Said:
    assert made.parser is not None
    parser = made.parser()
    return said(merge([delta for char in text for delta in parser.feed(char)] + parser.close()))


def outputs(made: OutputPlan, renamed: bool = False, rounds: int = 4, limit: int = 400) -> list[str]:
    """Random whole outputs under the plan's grammar."""
    texts = [driver(renamed).sample(grammar(made, renamed), seed, limit, WAYS_OUT) for seed in range(rounds)]
    ended = [text for text in texts if text is not None]
    assert ended
    return ended


def assert_calls_are_valid(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), NOTHING if SCHEMAS[name] is None else SCHEMAS[name])


# Of free text.
WAYS_OUT = (
    "</parameter>",
    "</arg_value>",
    "</｜DSML｜parameter>",
    "<|end|><|start|>assistant",
    "<|channel|>commentary",
)
FORMS = [name for name in FORMATS if name not in ("react",)] + [HARMONY]
SPECIAL = {HARMONY, "mistral", "mistral_v11", "kimi_k2"}


class TestForcedCalls:
    @pytest.mark.parametrize("form", FORMS)
    def test_required_is_one_or_more_valid_calls_and_nothing_else(self, form: str) -> None:
        renamed = form in SPECIAL
        made = plan(form, tools=tools(), tool_choice="required", renamed=renamed)
        for text in outputs(made, renamed):
            content, _, calls = read(made, text)
            assert calls and (form == HARMONY or content == ""), text
            assert_calls_are_valid(calls)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", ["ping", "trip"])
    def test_a_named_tool_is_called_once(self, form: str, name: str) -> None:
        renamed = form in SPECIAL
        choice = {"type": "function", "function": {"name": name}}
        made = plan(form, tools=tools(), tool_choice=choice, renamed=renamed)
        for text in outputs(made, renamed, rounds=3):
            content, _, calls = read(made, text)
            assert [called for called, _ in calls] == [name] and (form == HARMONY or content == ""), text
            assert_calls_are_valid(calls)

    def test_react_prompts_are_answered_in_their_form(self) -> None:
        made = plan(None, tools=tools("ping"), tool_choice="required", react=True)
        assert outputs(made, rounds=1)[0].startswith("Action: ping\nAction Input: ")
        assert [json.loads(a) for _, a in read(made, outputs(made)[0])[2]] == [{"word": "blue"}]

    def test_an_unknown_form_is_forced_as_json(self) -> None:
        made = plan(None, tools=tools("ping"), tool_choice="required", parallel_tool_calls=False)
        assert json.loads(outputs(made)[0]) == [{"name": "ping", "arguments": {"word": "blue"}}]

    def test_an_argument_that_is_called_name(self) -> None:
        schema = {
            "type": "object",
            "properties": {"name": {"const": "Rex"}},
            "required": ["name"],
            "additionalProperties": False,
        }
        tool = {"type": "function", "function": {"name": "add_pet", "parameters": schema}}
        choice = {"type": "function", "function": {"name": "add_pet"}}
        for form in ("hermes", "pythonic", None):
            made = plan(form, tools=[tool], tool_choice=choice)
            _, _, ((name, arguments),) = read(made, outputs(made)[0])
            assert name == "add_pet" and json.loads(arguments) == {"name": "Rex"}

    def test_one_call_only_without_parallel_calls(self) -> None:
        for body in ({"parallel_tool_calls": False, "tools": tools("ping", "now"), "tool_choice": "required"},):
            made = plan("hermes", **body)
            assert all(len(read(made, text)[2]) == 1 for text in outputs(made, rounds=6))

    def test_legacy_function_call(self) -> None:
        function = {"name": "ping", "parameters": PING}
        made = plan("hermes", functions=[function], function_call={"name": "ping"})
        assert read(made, outputs(made)[0])[2][0][0] == "ping"

    def test_allowed_tools(self) -> None:
        choice = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "ping"}}]},
        }
        made = plan("hermes", tools=tools(), tool_choice=choice)
        assert {name for text in outputs(made) for name, _ in read(made, text)[2]} == {"ping"}
        auto = {"type": "allowed_tools", "allowed_tools": {**choice["allowed_tools"], "mode": "auto"}}
        made = plan("hermes", tools=tools(), tool_choice=auto)
        now = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
        assert made.grammar is None and read(made, now) == (now, "", [])

    def test_parameters_that_tags_cannot_hold_are_forced_as_json(self) -> None:
        schema = {
            "type": "object",
            "properties": {"code": {"type": "string", "pattern": "^[a-z]{3}$"}},
            "required": ["code"],
            "additionalProperties": False,
        }
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        made = plan("qwen3_coder", tools=[tool], tool_choice="required", parallel_tool_calls=False)
        _, _, ((_, arguments),) = read(made, outputs(made)[0])
        jsonschema.validate(json.loads(arguments), schema)

    @pytest.mark.parametrize(
        ("parameters", "place"),
        [
            ({"type": "object", "properties": {"a": {"type": "something"}}}, "/properties/a/type"),
            ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "/properties/a"),
            ({"type": "object", "properties": {"a": "red"}}, "/properties/a"),
            ({"not": {}}, "'not'"),
        ],
    )
    def test_a_broken_schema_names_the_tool(self, parameters: Any, place: str) -> None:
        broken = [*tools("ping"), {"type": "function", "function": {"name": "f", "parameters": parameters}}]
        error = refusal(tools=broken, tool_choice="required")
        assert error.param == "tools[1].function.parameters" and error.code == "invalid_json_schema"
        assert place in error.message
        assert plan("hermes", tools=broken).grammar is None, "free calls need no schema"


class TestCutForcedCalls:
    """A forced call that the token limit cuts anywhere."""

    CHOICES = ("required", {"type": "function", "function": {"name": "get"}})
    PLACE: ClassVar = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["city"],
    }
    TOOLS: ClassVar = [  # one name is the beginning of the other
        {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}},
        {"type": "function", "function": {"name": "get", "parameters": PLACE}},
    ]

    def whole(self, form: str, choice: Any, react: bool) -> tuple[OutputPlan, str, list[tuple[str, str]]]:
        """A plan, and one call as it is written under it."""
        renamed = form in SPECIAL
        made = plan(form, tools=self.TOOLS, tool_choice=choice, renamed=renamed, react=react, parallel_tool_calls=False)
        for text in outputs(made, renamed, rounds=12):
            _, _, calls = read(made, text)
            if len(calls) == 1 and calls[0][1] != "{}" and "get" not in calls[0][1] and "<|end|>" not in text:
                return made, text, calls
        raise AssertionError("no output with arguments")

    @pytest.mark.parametrize("form", [*FORMS, "react"])
    @pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
    def test_it_is_a_call_as_soon_as_its_name_is_whole_and_never_text(self, form: str, choice: Any) -> None:
        made, text, ((name, arguments),) = self.whole(form, choice, form == "react")
        name_ends = text.index(name) + len(name)
        for end in range(len(text) + 1):
            content, _, calls = read(made, text[:end])
            assert content == "", text[:end]
            if end <= name_ends:
                assert calls == [], text[:end]
            else:
                ((called, begun),) = calls
                assert called == name and arguments.startswith(begun), text[:end]

    @pytest.mark.parametrize("form", FORMS)
    def test_the_second_of_two(self, form: str) -> None:
        """The first stays; of the second, what is there."""
        renamed = form in SPECIAL
        made = plan(form, tools=self.TOOLS, tool_choice="required", renamed=renamed)
        texts = [text for text in outputs(made, renamed, rounds=12) if len(read(made, text)[2]) > 1]
        if form in (HARMONY, "internlm", "kimi_k2", "gigachat3"):  # one call an answer
            assert not texts
            return
        text = min(texts, key=len)
        whole = read(made, text)[2]
        for end in range(len(text)):
            content, _, calls = read(made, text[:end])
            assert content == "" and [name for name, _ in calls] == [name for name, _ in whole[: len(calls)]]
            assert all(done == begun for done, begun in zip(whole, calls[:-1], strict=False))

    def test_thoughts_before_it_stay_thoughts(self) -> None:
        made = plan("hermes", "think", tools=self.TOOLS, tool_choice="required")
        assert read(made, "<think>hm") == ("", "hm", [])
        assert read(made, "<think>hm</think>\n<tool_c") == ("", "hm", [])
        assert read(made, '<think>hm</think>\n<tool_call>\n{"name": "get", "ar') == ("", "hm", [("get", "")])

    def test_ids_have_the_formats_form(self) -> None:
        made = plan("kimi_k2", tools=self.TOOLS, tool_choice="required", renamed=True)
        assert made.parser is not None
        parser = made.parser()
        (start,) = parser.feed("<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0") + parser.close()
        assert isinstance(start, ToolCallStart) and start.id == "functions.get:0"


class TestFreeCalls:
    def test_auto_is_free(self) -> None:
        made = plan("hermes", tools=tools())
        assert made.grammar is None
        assert read(made, 'Hi <tool_call>{"name": "now"}</tool_call>') == ("Hi", "", [("now", "{}")])

    def test_none_reads_no_calls(self) -> None:
        assert plan("hermes", tools=tools(), tool_choice="none") == OutputPlan()
        assert plan("hermes") == OutputPlan()

    @pytest.mark.parametrize("form", [name for name in FORMS if FORMATS.get(name) is None or FORMATS[name].shape])
    def test_strict_calls_are_valid_wherever_they_come(self, form: str) -> None:
        renamed = form in SPECIAL
        made = plan(form, tools=tools("ping", "trip", strict=True), renamed=renamed)
        forced = plan(
            form, tools=tools("ping", "trip"), tool_choice="required", parallel_tool_calls=False, renamed=renamed
        )
        for text in outputs(forced, renamed, rounds=3):
            assert_takes(grammar(made, renamed), driver(renamed), text)
        if form != HARMONY:
            assert_takes(grammar(made, renamed), driver(renamed), "Just text.")

    def test_a_strict_call_cannot_go_wrong(self) -> None:
        made = plan("hermes", tools=tools("ping", strict=True))
        good = 'Hm.\n<tool_call>\n{"name": "ping", "arguments": {"word": "blue"}}\n</tool_call>'
        assert_takes(grammar(made), driver(False), good)
        state = grammar(made)
        assert not all(state.accept(token) for token in driver(False).ids(good.replace("blue", "red")))

    def test_tools_that_are_not_strict_beside_one_that_is(self) -> None:
        made = plan("hermes", tools=[*tools("ping", strict=True), *tools("trip")])
        assert_takes(grammar(made), driver(False), '<tool_call>\n{"name": "trip", "arguments": {"x": 1}}\n</tool_call>')

    def test_their_arguments_are_objects_all_the_same(self) -> None:
        """Anything else would be read as text, which nothing constrains."""
        bad = '<tool_call>\n{"name": "trip", "arguments": "text"}\n</tool_call>'
        for body in ({"tools": [*tools("ping", strict=True), *tools("trip")]}, {"response_format": AS_JSON}):
            made = plan("hermes", **{"tools": tools("trip"), **body})
            assert not takes(grammar(made), driver(False), bad)

    def test_they_have_arguments_where_these_stand_one_by_one(self) -> None:
        made = plan("qwen3_coder", tools=[*tools("ping", strict=True), *tools("trip")])
        text = "<tool_call>\n<function=trip>\n<parameter=to>\nx\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        assert_takes(grammar(made), driver(False), text + "</function>\n</tool_call>")

    def test_strict_is_refused_where_it_cannot_be_kept(self) -> None:
        error = refusal("pythonic", tools=tools("ping", strict=True))
        assert error.param == "tools[0].function.strict"

    def test_react_keeps_strict(self) -> None:
        made = plan(None, tools=tools("ping", strict=True), react=True)
        text = 'Thought: hm\nAction: ping\nAction Input: {"word": "blue"}'
        assert_takes(grammar(made), driver(False), text)
        assert not takes(grammar(made), driver(False), text.replace("blue", "red"))


def takes(state: Grammar, drive: GrammarDriver, text: str) -> bool:
    return all(state.accept(token) for token in drive.ids(text)) and drive.may_end(state)


def assert_takes(state: Grammar, drive: GrammarDriver, text: str) -> None:
    for place, token in enumerate(drive.ids(text)):
        assert state.accept(token), f"refused behind {drive.text(drive.ids(text)[:place])!r}"
    assert drive.may_end(state), text


class TestFormats:
    @pytest.mark.parametrize(
        ("body", "good", "bad"),
        [
            ({"response_format": AS_JSON}, '{"a": 1}', '{"a": "x"}'),
            ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
            ({"structured_outputs": {"json": ANSWER}}, '{"a": 1}', "{}"),
            ({"structured_outputs": {"json": json.dumps(ANSWER)}}, '{"a": 1}', "{}"),
            ({"structured_outputs": {"json_object": True}}, "{}", "1"),
            ({"structured_outputs": {"regex": "[0-9]{3}"}}, "042", "42"),
            ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
            ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "yes", "maybe"),
            ({"structured_outputs": {"json": ANSWER, "disable_any_whitespace": True}}, '{"a":1}', '{"a": 1}'),
            ({"structured_outputs": {"json": ANSWER, "whitespace_pattern": " ?"}}, '{"a": 1}', '{"a":\n1}'),
            (
                {"structured_outputs": {"json": {"properties": {"a": {}}}, "disable_additional_properties": True}},
                '{"a": 1}',
                '{"b": 1}',
            ),
            ({"guided_json": ANSWER}, '{"a": 1}', "{}"),
            ({"guided_json": ANSWER, "guided_whitespace_pattern": " ?"}, '{"a": 1}', '{"a":\n1}'),
            ({"guided_regex": "ab+"}, "abb", "a"),
            ({"guided_choice": ["x", "y"]}, "x", "z"),
            ({"guided_grammar": 'start: "a" "b"'}, "ab", "a"),
            ({"guided_json_object": True}, "{}", "[]"),
        ],
        ids=str,
    )
    def test_every_way_to_ask(self, body: dict[str, Any], good: str, bad: str) -> None:
        made = plan(**body)
        assert takes(grammar(made), driver(False), good) and not takes(grammar(made), driver(False), bad)
        constraint = CompletionRequest.parse({"prompt": "x", **body}).constraint
        completion = asyncio.run(OutputFormats(Formats(), tokenizer(False)).plan_completion(constraint))
        assert completion.grammar == made.grammar

    @pytest.mark.parametrize(
        ("body", "param", "code"),
        [
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
                "response_format",
                "invalid_json_schema",
            ),
            ({"guided_json": {"enum": []}}, "guided_json", "invalid_json_schema"),
            ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "invalid_json_schema"),
            ({"guided_regex": "ab**"}, "guided_regex", "invalid_grammar"),
            ({"structured_outputs": {"grammar": "bogus"}}, "structured_outputs.grammar", "invalid_grammar"),
            (
                {"structured_outputs": {"json": ANSWER, "whitespace_pattern": " *"}},
                "structured_outputs.whitespace_pattern",
                "invalid_value",
            ),
            (
                {"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}},
                "structured_outputs.whitespace_pattern",
                "invalid_value",
            ),
            ({"guided_json": ANSWER, "guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "invalid_value"),
        ],
        ids=str,
    )
    def test_what_cannot_be_kept_is_refused(self, body: dict[str, Any], param: str, code: str) -> None:
        error = refusal(**body)
        assert (error.param, error.code) == (param, code) and error.status == 400

    def test_the_place_within_a_schema(self) -> None:
        schema = {"type": "object", "properties": {"colour": "red"}}
        error = refusal(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        assert "/properties/colour" in error.message

    def test_an_answer_or_a_call(self) -> None:
        made = plan("hermes", tools=tools("ping"), response_format=AS_JSON)
        call = '<tool_call>\n{"name": "ping", "arguments": {"word": "blue"}}\n</tool_call>'
        assert takes(grammar(made), driver(False), '{"a": 1}') and takes(grammar(made), driver(False), call)
        assert not takes(grammar(made), driver(False), "text")
        assert read(made, call)[2] == [("ping", '{"word": "blue"}')] and read(made, '{"a": 1}')[0] == '{"a": 1}'

    def test_a_forced_call_wins_over_the_answers_format(self) -> None:
        made = plan("hermes", tools=tools("ping"), tool_choice="required", response_format=AS_JSON)
        assert not takes(grammar(made), driver(False), '{"a": 1}')

    def test_a_clients_grammar_beside_tools(self) -> None:
        error = refusal(tools=tools("ping"), guided_grammar='start: "a"')
        assert error.param == "guided_grammar"
        assert plan("hermes", tools=tools("ping"), tool_choice="none", guided_grammar='start: "a"').grammar


class TestOwnDescription:
    """A checkpoint that describes its output itself: what is constrained is not of that form, and read as it is."""

    TEMPLATE: ClassVar = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "<reason>", "close": "</reason>"},
            "content": {"close": "<|end|>"},
            "tool_calls": {"open": "<<call ", "close": ">>", "content": "json", "repeats": True},
        },
    }

    def plan(self, **body: Any) -> OutputPlan:
        request = ChatCompletionRequest.parse({"messages": [{"role": "user", "content": "Hi"}], **body})
        rendered = Rendered(text="<|assistant|><reason>", pieces=(), source="test")
        outputs = OutputFormats(formats("", response_template=self.TEMPLATE), tokenizer(False))
        return asyncio.run(outputs.plan(request, Prompt((1,), rendered.text, rendered=rendered)))

    def test_forced_calls(self) -> None:
        made = self.plan(tools=tools(), tool_choice="required")
        for text in outputs(made):
            content, reasoning, calls = read(made, text)
            assert calls and not content and not reasoning
            assert_calls_are_valid(calls)

    def test_an_answer(self) -> None:
        assert self.plan(response_format=AS_JSON).parser is None
        made = self.plan(response_format=AS_JSON, tools=tools())
        assert read(made, '{"a": 1}') == ('{"a": 1}', "", [])


class TestBehindReasoning:
    """The constraint is on the answer, not on the thoughts; and it is never left out."""

    def test_an_open_block_with_one_token_at_its_end(self) -> None:
        made = plan(None, "think", prompt="<think>\n", renamed=True, response_format=AS_JSON)
        end = tokenizer(True).added_tokens["</think>"]
        assert made.grammar == GrammarSpec("json_schema", json.dumps(ANSWER, separators=(",", ":")), (end,))
        assert takes(grammar(made, True), driver(True), 'hm {"</think>{"a": 1}')
        assert not takes(grammar(made, True), driver(True), "hm</think>text")
        assert read(made, 'hm</think>{"a": 1}')[:2] == ('{"a": 1}', "hm")

    def test_an_open_block_whose_end_is_several_tokens(self) -> None:
        made = plan(None, "think", prompt="<think>\n", response_format=AS_JSON)
        assert takes(grammar(made), driver(False), 'hm {"</think>\n\n{"a": 1}')
        assert not takes(grammar(made), driver(False), "hm</think>text")
        assert not takes(grammar(made), driver(False), '{"a": 1}'), "the thoughts have not ended"

    @pytest.mark.parametrize("renamed", [False, True])
    def test_a_block_that_the_model_may_open(self, renamed: bool) -> None:
        made = plan(None, "think", prompt="assistant\n", renamed=renamed, response_format=AS_JSON)
        for text in ('{"a": 1}', '<think>hm {"a"</think>\n\n{"a": 1}'):
            assert takes(grammar(made, renamed), driver(renamed), text)
            assert read(made, text)[0] == '{"a": 1}'
        assert not takes(grammar(made, renamed), driver(renamed), "<think>hm</think>text")
        assert not takes(grammar(made, renamed), driver(renamed), "text")

    def test_a_block_that_the_prompt_closed(self) -> None:
        made = plan(None, "think", prompt="<think>\n\n</think>\n\n", response_format=AS_JSON)
        assert takes(grammar(made), driver(False), '{"a": 1}')
        assert not takes(grammar(made), driver(False), '<think>x</think>{"a": 1}')

    @pytest.mark.parametrize("renamed", [False, True])
    @pytest.mark.parametrize("prompt", ["<think>\n", "assistant\n"])
    def test_forced_calls_behind_thoughts(self, renamed: bool, prompt: str) -> None:
        made = plan("hermes", "think", prompt=prompt, renamed=renamed, tools=tools("ping"), tool_choice="required")
        call = '<tool_call>\n{"name": "ping", "arguments": {"word": "blue"}}\n</tool_call>'
        text = f"{'' if prompt == '<think>' + chr(10) else '<think>'}hm</think>{call}"
        assert takes(grammar(made, renamed), driver(renamed), text)
        assert read(made, text) == ("", "hm", [("ping", '{"word": "blue"}')])

    @pytest.mark.parametrize(
        ("body", "text", "content"),
        [
            ({"guided_choice": ["yes", "no"]}, "<think>hm</think>\nyes", "yes"),
            ({"guided_regex": "[0-9]/[0-9]"}, "<think>hm</think>\n1/2", "1/2"),
            ({"guided_json_object": True}, "<think>hm</think>\n{}", "{}"),
        ],
    )
    def test_other_constraints(self, body: dict[str, Any], text: str, content: str) -> None:
        made = plan(None, "think", **body)
        assert takes(grammar(made), driver(False), text) and read(made, text)[0] == content
        assert not takes(grammar(made), driver(False), text + "x")

    def test_a_clients_grammar_needs_thinking_switched_off(self) -> None:
        assert refusal(None, "think", prompt="<think>", guided_grammar='start: "a"').param == "guided_grammar"
        assert plan(None, "think", prompt="<think></think>", guided_grammar='start: "a"').grammar is not None

    def test_the_final_message_of_gpt_oss(self) -> None:
        made = plan(HARMONY, HARMONY, renamed=True, response_format=AS_JSON)
        thoughts = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant"
        good = '<|channel|>final<|message|>{"a": 1}'
        for text in (good, thoughts + good):
            assert takes(grammar(made, True), driver(True), text)
            assert read(made, text)[0] == '{"a": 1}'
        for text in (
            thoughts + "<|channel|>final<|message|>text",
            '{"a": 1}',
            "<|channel|>commentary<|message|>text<|return|>",
        ):
            assert not takes(grammar(made, True), driver(True), text)


def test_special_tokens_that_a_parser_needs_are_kept() -> None:
    assert plan("kimi_k2", tools=tools(), renamed=True).keep == {
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    }
    assert plan("hermes", tools=tools(), renamed=True).keep == frozenset()
    assert plan(HARMONY, HARMONY, renamed=True).keep >= {"<|channel|>", "<|message|>"}
