"""Constraints: what is refused and where, what a grammar lets through, masks, rollback, and the end of an output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from engine.grammar import Grammar, GrammarCompiler, GrammarError, check, check_whitespace, fill_rows
from engine.messages import GrammarSpec
from tests.unit.grammar_driver import EOS, VOCAB, GrammarDriver, driver

POINT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NEWLINE = 198


@pytest.fixture(scope="module")
def drive() -> GrammarDriver:
    return driver()


def refusal(kind: str, source: Any) -> GrammarError:
    text = source if isinstance(source, str) and kind != "json_schema" else json.dumps(source)
    with pytest.raises(GrammarError) as refused:
        check(GrammarSpec(kind, text))
    return refused.value


def nested(depth: int, wrap: Any) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def node(properties: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    """An object that must have these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "$defs": definitions}


class TestRefusals:
    @pytest.mark.parametrize(
        "pattern",
        [
            "ab**",
            "[",
            "(?P<x",
            "a{2,1}",
            "\\",
            "(?=a)b",
            r"(a)\1",
            "a{100000}",
            "(?:a{1000}){1000}",
            "((a{30}){30}){30}",
        ],
    )
    def test_broken_or_huge_patterns(self, pattern: str) -> None:
        assert refusal("regex", pattern).message

    @pytest.mark.parametrize(
        "pattern",
        ["(a+)+$", "(a|a)*b", "(([a-z])+.)+[A-Z]([a-z])+$", r"\p{L}{3}", "a+?", "[]a]{3}", r"\\", "^x$", "a{10000}"],
    )
    def test_patterns_that_look_dangerous_and_are_not(self, pattern: str) -> None:
        started = time.process_time()
        check(GrammarSpec("regex", pattern))
        assert time.process_time() - started < 2

    @pytest.mark.parametrize(
        ("schema", "where", "says"),
        [
            ({"type": "object", "properties": {"colour": "red"}}, "/properties/colour", "a schema"),
            ({"type": "objekt"}, "/type", "objekt"),
            ({"type": ["string", 5]}, "/type", "a number"),
            ({"type": "object", "required": "name"}, "/required", "an array"),
            ({"enum": []}, "/enum", "empty"),
            ([], "", "an array"),
            (False, "", "false"),
            ("{", "", "a string"),
            ({"anyOf": []}, "/anyOf", "non-empty"),
            ({"properties": {"a": {"items": {"pattern": "("}}}}, "/properties/a/items", "unclosed group"),
            ({"properties": {"a": {"pattern": "a{99999}"}}}, "/properties/a/pattern", "too large"),
            ({"properties": {"a": {"not": {"type": "null"}}}}, "/properties/a", "'not'"),
            ({"if": {}, "then": {"type": "null"}}, "", "'if'"),
            ({"type": "array", "uniqueItems": True}, "", "'uniqueItems'"),
            ({"type": "array", "contains": {}}, "", "'contains'"),
            ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "", "oneOf"),
            ({"$ref": "https://example.com/schema"}, "/$ref", "inside the schema"),
            ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "/properties/a", "does not exist"),
            ({"type": "integer", "multipleOf": 99999989}, "/multipleOf", "digits"),
            ({"type": "integer", "minimum": "1"}, "/minimum", "a number"),
            ({"type": "string", "minLength": -1}, "/minLength", "at least 0"),
            ({"type": "string", "format": "regex"}, "/format", "'regex'"),
            ({"type": "integer", "minimum": 5, "maximum": 2}, "", "greater than maximum"),
            ({"type": "object", "minProperties": 2}, "", "minProperties"),
            ({"const": "a\u0000b"}, "/const", "control characters"),
            ({"x-guidance": {"whitespace_pattern": " *"}}, "", "must be made of"),
        ],
    )
    def test_schemas_by_name_and_place(self, schema: Any, where: str, says: str) -> None:
        error = refusal("json_schema", schema)
        assert error.where == where and says in error.message

    @pytest.mark.parametrize(
        ("schema", "where"),
        [
            (node({"a": {"$ref": "#"}}), "/properties/a"),
            (node({"a": {"$ref": "#/$defs/b"}}, b={"$ref": "#/$defs/c"}, c={"$ref": "#/$defs/b"}), "/properties/a"),
            (node({"b": {"$ref": "#/$defs/b"}}, b=node({"c": {"$ref": "#/$defs/b"}})), "/properties/b"),
            (node({"n": {}, "all": {"allOf": [{"$ref": "#"}]}}), "/properties/all/allOf/0"),
            (node({"either": {"anyOf": [{"$ref": "#"}, node({"x": {"$ref": "#"}})]}}), "/properties/either/anyOf/0"),
            ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "/items"),
            ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "/prefixItems/0"),
            ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, "/additionalProperties"),
            ({"$ref": "#"}, ""),
        ],
    )
    def test_what_must_contain_itself_has_no_end(self, schema: Any, where: str) -> None:
        error = refusal("json_schema", schema)
        assert error.where == where and "no finite value" in error.message

    @pytest.mark.parametrize(
        "schema",
        [
            node({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
            {"type": "object", "properties": {"next": {"$ref": "#"}}},
            {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
            node({"kids": {"type": "array", "items": {"$ref": "#"}}}),
            node({"b": {"$ref": "#/$defs/b"}}, b=node({"c": {"$ref": "#/$defs/c"}}), c={"const": 1}),
            {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1},
            {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"$ref": "#/prefixItems/0"}},
        ],
    )
    def test_what_may_contain_itself_has(self, schema: Any) -> None:
        check(GrammarSpec("json_schema", json.dumps(schema)))

    def test_what_demands_nothing_is_no_reason_to_refuse(self) -> None:
        harmless = {"uniqueItems": False, "if": {}, "unevaluatedProperties": True, "dependentRequired": {}}
        check(GrammarSpec("json_schema", json.dumps({**POINT, **harmless, "title": "t", "x-own": 1, "nullable": True})))
        check(GrammarSpec("json_schema", json.dumps({"type": "integer", "format": "int32"})))

    @pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "{", "nan(", '{"a": 1', ""])
    def test_text_that_is_no_schema(self, text: str) -> None:
        with pytest.raises(GrammarError):
            check(GrammarSpec("json_schema", text))

    @pytest.mark.parametrize(
        "schema",
        [
            nested(60, lambda inner: {"type": "array", "items": inner}) | {"enum": list(range(20_000))},
            {"enum": list(range(20_000))},
            {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}},
            {"anyOf": [{"const": i} for i in range(12_000)]},
            nested(120, lambda inner: {"type": "array", "items": inner}),
            {"description": "x" * 600_000},
            {"allOf": [{"anyOf": [{"properties": {f"p{j}_{i}": {}}} for i in range(8)]} for j in range(8)]},
        ],
    )
    def test_size_bombs_are_refused_quickly(self, schema: Any) -> None:
        started = time.process_time()
        assert refusal("json_schema", schema).message
        assert time.process_time() - started < 5

    def test_long_chains_of_references_do_not_overflow_the_stack(self) -> None:
        """Compiled on a thread of the usual size such chains end the process."""
        code = """
import json
from engine.grammar import GrammarError, check
from engine.messages import GrammarSpec
wraps = [
    lambda x: {"type": "object", "properties": {"x": x}, "required": ["x"]},
    lambda x: {"allOf": [x, {"minimum": 1}]},
    lambda x: x,
]
refused = 0
for wrap in wraps:
    for n in (200, 900, 3000):
        chain = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
        schema = {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{n}": {"type": "integer"}}}
        try:
            check(GrammarSpec("json_schema", json.dumps(schema)))
        except GrammarError:
            refused += 1
print("refused", refused)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and 3 <= int(done.stdout.split()[1]) < 9, done.stderr

    @pytest.mark.parametrize(
        "grammar",
        [
            "bogus",
            'start: "a',
            'start: %json {"type": "objekt"}',
            'start: %json {"type": "object"',
            'start: A{100000}\nA: "b"{100000}',
            'start: X\nX: A{100}\nA: "b"{101}',
            "\n".join(["start: T0", *(f'T{i}: "a" T{i + 1} | "b"' for i in range(500)), 'T500: "x"']),
            "start: /a{99999}/",
        ],
    )
    def test_grammars(self, grammar: str) -> None:
        started = time.process_time()
        assert refusal("lark", grammar).message
        assert time.process_time() - started < 2

    def test_messages_are_short_and_hold_no_excerpt(self) -> None:
        assert "\n" not in refusal("regex", "[" + "a" * 500).message
        assert len(refusal("regex", "[" + "a" * 500).message) <= 400
        assert "coerce" not in refusal("json_schema", {"oneOf": [{}, {}]}).message

    def test_an_unknown_kind(self) -> None:
        assert "kind" in refusal("xml", "<a/>").message


class TestWhitespace:
    @pytest.mark.parametrize("pattern", ["", " ?", r"\n? {0,4}", r"[ \n\t]{0,8}", r"(?: |\n)?", r"[\x20\n]{2}"])
    def test_bounded_patterns(self, pattern: str) -> None:
        if pattern:
            check_whitespace(pattern)
        else:
            with pytest.raises(GrammarError):
                check_whitespace(pattern)

    @pytest.mark.parametrize(
        "pattern", [" *", r"\s{0,3}", "[ ]+", " {3,}", "x", '"', "[^a]", ".", " {0,65}", 5, None, "("]
    )
    def test_endless_or_other_patterns(self, pattern: Any) -> None:
        if pattern == "(":
            assert refusal("json_schema", {"x-guidance": {"whitespace_pattern": pattern}})
        else:
            with pytest.raises(GrammarError):
                check_whitespace(pattern)

    @pytest.mark.parametrize(
        "source", [("json_schema", POINT), ("json_object", ""), ("lark", 'start: %json {"type": "object"}')]
    )
    def test_a_run_of_newlines_ends(self, drive: GrammarDriver, source: tuple[str, Any]) -> None:
        """A model that wants nothing but new lines gets few of them, everywhere."""
        grammar = drive.grammar(*source)
        out: list[int] = []
        for token in drive.ids('{"a"'):
            assert grammar.accept(token)
        while NEWLINE in drive.allowed(grammar) and len(out) < 50:
            assert grammar.accept(NEWLINE)
            out.append(NEWLINE)
        assert len(out) <= 1

    @pytest.mark.parametrize("seed", range(6))
    def test_no_long_run_in_random_outputs(self, drive: GrammarDriver, seed: int) -> None:
        import re

        text = drive.sample(drive.grammar("json_schema", {"type": "array", "items": POINT, "maxItems": 3}), seed) or ""
        assert not re.search(r"\s{17}", text)

    def test_none_at_all_on_request(self, drive: GrammarDriver) -> None:
        schema = {**POINT, "x-guidance": {"whitespace_flexible": False}}
        assert drive.takes(drive.grammar("json_schema", schema), '{"a":1}')
        assert not drive.takes(drive.grammar("json_schema", schema), '{"a": 1}')


class TestSchemas:
    @pytest.mark.parametrize(
        ("schema", "text", "fits"),
        [
            (POINT, '{"a": 1}', True),
            (POINT, '{"a": 1, "b": 2}', False),
            (POINT, "{}", False),
            ({"type": "object", "properties": {"n": {"type": "number"}}}, '{"n":1,"d":"NW"}', True),
            ({"type": "object", "properties": {"n": {"type": "number"}}}, "{}", True),
            ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"a":1}', True),
            ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"a":"x"}', False),
            (
                {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"$ref": "#/prefixItems/0"}},
                "[1,2,3]",
                True,
            ),
            (
                {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"$ref": "#/prefixItems/0"}},
                '[1,"a"]',
                False,
            ),
            ({"enum": ["é", "日本", "🦊"]}, '"日本"', True),
            ({"enum": ["é", "日本", "🦊"]}, '"🦊"', True),
            ({"enum": ["é", "日本", "🦊"]}, '"日"', False),
            ({"const": None}, "null", True),
            ({"const": None}, "0", False),
            ({"type": "object", "properties": {"n": {"type": "integer"}}}, '{"n":1,"\\u006e":"x"}', False),
            (True, "[1, 2]", True),
            (True, "[1, 2", False),
        ],
    )
    def test_what_gets_through(self, drive: GrammarDriver, schema: Any, text: str, fits: bool) -> None:
        assert drive.takes(drive.grammar("json_schema", schema), text) == fits

    def test_recursion(self, drive: GrammarDriver) -> None:
        node = {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
        assert drive.takes(drive.grammar("json_schema", node), '{"v":1,"next":{"v":2,"next":null}}')
        grammar = drive.grammar("json_schema", node)
        assert not all(grammar.accept(token) for token in drive.ids('{"v":"x'))

    def test_keys_come_in_the_order_of_the_schema(self, drive: GrammarDriver) -> None:
        schema = {
            "type": "object",
            "properties": {"thoughts": {"type": "string", "maxLength": 4}, "answer": {"type": "integer", "maximum": 9}},
            "required": ["thoughts", "answer"],
            "additionalProperties": False,
        }
        texts = [drive.sample(drive.grammar("json_schema", schema), seed) for seed in range(8)]
        keys = [list(json.loads(text)) for text in texts if text is not None]
        assert keys and all(order == ["thoughts", "answer"] for order in keys)

    def test_escapes_in_the_schemas_own_text_change_nothing(self, drive: GrammarDriver) -> None:
        for text in ('{"properties":{"città":{"const":"é"}}}', '{"properties":{"citt\\u00e0":{"const":"\\u00e9"}}}'):
            grammar = drive.compiler.compile(GrammarSpec("json_schema", text))
            assert drive.takes(grammar, '{"città":"é"}')
            assert not drive.takes(drive.compiler.compile(GrammarSpec("json_schema", text)), '{"città":"e"}')

    def test_large_repeats_compile_quickly(self, drive: GrammarDriver) -> None:
        level: Any = {"type": "string", "maxLength": 10_000}
        for _ in range(3):
            level = {
                "type": "object",
                "properties": {
                    "s": {"type": "string", "maxLength": 10_000},
                    "a": {"type": "array", "maxItems": 1000, "items": level},
                },
                "required": ["s", "a"],
            }
        started = time.process_time()
        assert drive.takes(drive.grammar("json_schema", level), '{"s":"x","a":[]}')
        assert time.process_time() - started < 2


class TestOtherKinds:
    def test_choices(self, drive: GrammarDriver) -> None:
        choices = ["yes", "no", 'a "quote"\n', "日本"]
        for choice in choices:
            assert drive.takes(drive.grammar("choice", choices), choice)
        assert not drive.takes(drive.grammar("choice", choices), "maybe")
        assert {drive.sample(drive.grammar("choice", ["yes", "no"]), seed) for seed in range(20)} == {"yes", "no"}

    def test_patterns(self, drive: GrammarDriver) -> None:
        assert drive.takes(drive.grammar("regex", "[0-9]{3}"), "042")
        assert not drive.takes(drive.grammar("regex", "[0-9]{3}"), "42")
        assert drive.takes(drive.grammar("regex", "a/b"), "a/b")

    def test_lark_and_gbnf(self, drive: GrammarDriver) -> None:
        assert drive.takes(drive.grammar("lark", 'start: "a" // b{999999999}\n'), "a")
        assert drive.takes(drive.grammar("lark", 'root ::= "yes" | "no"'), "no")
        assert drive.takes(drive.grammar("lark", 'start: "x" %json {"type": "integer"} "y"'), "x12y")

    def test_any_object(self, drive: GrammarDriver) -> None:
        assert drive.takes(drive.grammar("json_object", ""), '{"a": [1, {"b": null}]}')
        assert not drive.takes(drive.grammar("json_object", ""), "[1]")


class TestState:
    def test_done_only_when_nothing_may_follow(self, drive: GrammarDriver) -> None:
        grammar = drive.grammar("regex", "ab+")
        for token in drive.ids("ab"):
            assert grammar.accept(token)
        assert not grammar.done and EOS in drive.allowed(grammar)
        assert grammar.accept(EOS) and grammar.done
        assert list(drive.allowed(grammar)) == [EOS]

    def test_a_refused_token_changes_nothing(self, drive: GrammarDriver) -> None:
        grammar = drive.grammar("json_schema", POINT)
        assert not grammar.accept(drive.ids("x")[0])
        assert all(grammar.accept(token) for token in drive.ids('{"a":1}')) and grammar.done

    def test_rollback_returns_to_the_same_masks(self, drive: GrammarDriver) -> None:
        grammar = drive.grammar("json_schema", {"type": "array", "items": POINT})
        tokens = drive.ids('[{"a": 12}, {"a": 3}]')
        masks = []
        for token in tokens:
            masks.append(drive.allowed(grammar))
            assert grammar.accept(token)
        assert grammar.done
        for back in range(len(tokens)):
            grammar.rollback(1)
            assert not grammar.done
            assert np.array_equal(drive.allowed(grammar), masks[-1 - back])
        assert all(grammar.accept(token) for token in tokens) and grammar.done

    def test_it_starts_behind_the_end_of_the_reasoning(self, drive: GrammarDriver) -> None:
        end = tuple(drive.ids("</think>"))
        assert len(end) > 1
        grammar = drive.grammar("json_schema", POINT, end)
        thoughts = [*drive.ids("hm {"), *end[:1], *end]
        for token in thoughts:
            assert not grammar.active and len(drive.allowed(grammar)) == VOCAB
            assert grammar.accept(token)
        assert grammar.active and drive.ids("hm")[0] not in drive.allowed(grammar)
        answer = drive.ids('{"a":1}')
        assert all(grammar.accept(token) for token in answer) and grammar.done
        grammar.rollback(len(answer) + 1)
        assert not grammar.active and not grammar.done
        assert grammar.accept(end[-1]) and grammar.active

    def test_sequences_of_one_grammar_do_not_share_state(self, drive: GrammarDriver) -> None:
        first, second = (drive.grammar("json_schema", POINT) for _ in range(2))
        assert all(first.accept(token) for token in drive.ids('{"a":1}')) and first.done
        assert not second.done and drive.takes(second, '{"a":2}')

    def test_a_complete_output_may_end_with_any_stop_id(self, drive: GrammarDriver) -> None:
        grammar = drive.grammar("regex", "ab+")
        grammar.stop_ids = frozenset({2, 31})
        assert not {2, 31, EOS} & set(drive.allowed(grammar).tolist())
        for token in drive.ids("ab"):
            assert grammar.accept(token)
        assert {2, 31, EOS} <= set(drive.allowed(grammar).tolist())
        assert grammar.accept(2) and grammar.done


class TestCompiler:
    def test_rows_filled_together_equal_rows_filled_alone(self, drive: GrammarDriver) -> None:
        sources = [("json_schema", POINT), ("choice", ["yes", "no"]), ("regex", "[0-9]{3}"), ("json_schema", POINT)]
        grammars = [
            drive.grammar(*source, start_after=(5,) if place == 3 else ()) for place, source in enumerate(sources)
        ]
        mask = np.full((6, VOCAB // 32), 7, dtype=np.int32)
        assert fill_rows([(row, grammars[place]) for place, row in enumerate((4, 0, 2, 5))], mask) == {}
        for place, row in enumerate((4, 0, 2, 5)):
            alone = np.zeros(VOCAB // 32, dtype=np.int32)
            grammars[place].fill(alone)
            assert np.array_equal(mask[row], alone)
        assert (mask[[1, 3]] == 7).all(), "rows without a grammar are left alone"

    def test_a_grammar_over_its_budget_fails_its_row_alone(self, drive: GrammarDriver) -> None:
        bomb = "\n".join(["start: a0", *(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)), 'a40: "x"'])
        grammars: list[Grammar] = [
            drive.grammar("json_schema", POINT),
            drive.grammar("lark", bomb),
            drive.grammar("choice", ["a"]),
        ]
        mask = np.zeros((3, VOCAB // 32), dtype=np.int32)
        with pytest.raises(GrammarError):
            grammars[1].accept(int(drive.allowed(grammars[1])[-1]))
        failed = fill_rows(list(enumerate(grammars)), mask)
        assert list(failed) == [1] and failed[1].message
        with pytest.raises(GrammarError):
            grammars[1].fill(mask[1])
        assert mask[0].any() and mask[2].any()

    def test_columns_beyond_the_vocabulary_are_forbidden(self, drive: GrammarDriver) -> None:
        padded = GrammarCompiler(drive.compiler._path, VOCAB + 70)
        row = np.full(-(-(VOCAB + 70) // 32), -1, dtype=np.int32)
        padded.compile(GrammarSpec("regex", "(.|\n)+")).fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert bits[:VOCAB].any() and not bits[VOCAB:].any()

    def test_logits_narrower_than_the_vocabulary(self, drive: GrammarDriver) -> None:
        narrow = GrammarCompiler(drive.compiler._path, VOCAB - 64)
        row = np.zeros(VOCAB // 32 - 2, dtype=np.int32)
        full = np.zeros(VOCAB // 32, dtype=np.int32)
        narrow.compile(GrammarSpec("regex", "[a-z]+")).fill(row)
        drive.grammar("regex", "[a-z]+").fill(full)
        assert np.array_equal(row, full[:-2])

    def test_a_folder_without_a_usable_tokenizer(self, tmp_path: Any) -> None:
        with pytest.raises(GrammarError, match="tokenizer"):
            GrammarCompiler(tmp_path, 100).compile(GrammarSpec("regex", "a"))
        (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
        with pytest.raises(GrammarError, match="tokenizer"):
            GrammarCompiler(tmp_path, 100).compile(GrammarSpec("regex", "a"))

    def test_unknown_special_tokens_fail_in_the_engine_alone(self, drive: GrammarDriver) -> None:
        spec = GrammarSpec("lark", 'start: <|nobody|> "a"')
        check(spec)
        with pytest.raises(GrammarError, match="nobody"):
            drive.compiler.compile(spec)

    def test_in_the_background(self, drive: GrammarDriver) -> None:
        grammar = drive.compiler.submit(GrammarSpec("choice", '["a"]')).result(30)
        assert drive.takes(grammar, "a")

    def test_only_the_latest_are_kept(self, drive: GrammarDriver) -> None:
        for number in range(80):
            drive.grammar("choice", [f"c{number}"])
        assert len(drive.compiler._compiled) <= 64
