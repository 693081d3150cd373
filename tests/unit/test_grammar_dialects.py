"""What schema generators and grammar writers produce: names in references, numbers beyond doubles, lark's `?start`."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from engine.grammar import GrammarError, check
from engine.messages import GrammarSpec
from tests.unit.grammar_driver import GrammarDriver, driver

INT64 = 2**63 - 1


@pytest.fixture(scope="module")
def drive() -> GrammarDriver:
    return driver()


def takes(drive: GrammarDriver, schema: Any, value: Any) -> bool:
    return drive.takes(drive.grammar("json_schema", schema), json.dumps(value))


def refusal(kind: str, source: Any) -> GrammarError:
    with pytest.raises(GrammarError) as refused:
        check(GrammarSpec(kind, source if isinstance(source, str) else json.dumps(source)))
    return refused.value


class TestReferences:
    @pytest.mark.parametrize(
        ("name", "written"),
        [
            ("Page[int]", "Page[int]"),
            ("Page[int]", "Page%5Bint%5D"),
            ("Map<str, int>", "Map<str, int>"),
            ("città", "città"),
            ("a#b", "a#b"),
            ("100%", "100%"),
            ("a/b~c", "a~1b~0c"),
            ('"q"\\', '"q"\\'),
        ],
    )
    def test_to_names_of_any_characters(self, drive: GrammarDriver, name: str, written: str) -> None:
        schema = {"$ref": f"#/$defs/{written}", "$defs": {name: {"type": "string"}, "other": {"type": "integer"}}}
        assert takes(drive, schema, "x") and not takes(drive, schema, 1)

    def test_an_endless_one_is_seen_through_its_spelling(self) -> None:
        node = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A%20B"}}, "required": ["a"]}
        assert "no finite value" in refusal("json_schema", {"$ref": "#/$defs/A B", "$defs": {"A B": node}}).message

    def test_to_an_anchor_are_refused_by_name(self) -> None:
        error = refusal("json_schema", {"$ref": "#here", "$defs": {"A": {"$anchor": "here", "type": "string"}}})
        assert (error.where, "$anchor" in error.message) == ("/$ref", True)


class TestNumbers:
    @pytest.mark.parametrize("value", [2**53 + 1, 12345678901234567890, -(2**60) - 1, 123456789.12345679])
    @pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": [v]}], ids=["plain", "nested"])
    def test_a_value_that_would_come_out_as_another_is_refused(self, value: Any, wrap: Any) -> None:
        for schema in ({"const": wrap(value)}, {"properties": {"p": {"enum": ["x", wrap(value)]}}}):
            error = refusal("json_schema", schema)
            assert error.where in ("/const", "/properties/p/enum") and "digits" in error.message

    @pytest.mark.parametrize("value", [2**53, -(2**53), 0.1 + 0.2, 1e22, 1.5, -1e-7, 0])
    def test_all_others_are_kept(self, drive: GrammarDriver, value: Any) -> None:
        grammar = drive.grammar("json_schema", {"enum": [value]})
        text = drive.sample(grammar, seed=0)
        assert text is not None and json.loads(text) == value

    @pytest.mark.parametrize("types", ["integer", ["integer", "null"], "number", ["number", "string"]])
    @pytest.mark.parametrize(
        "bounds",
        [
            {"minimum": -(2**63), "maximum": INT64},
            {"minimum": 0, "maximum": 2**64 - 1},
            {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
            {"minimum": 1234567890123456, "maximum": 1234567890123999},
            {"minimum": 123456789012345678, "maximum": 123456789012399999},
            {"exclusiveMinimum": -(2**53) - 1, "exclusiveMaximum": 2**53 + 1},
            {"minimum": -(2**62) - 1, "maximum": -(2**53) - 1},
        ],
        ids=str,
    )
    def test_bounds_hold_as_they_were_given(self, drive: GrammarDriver, types: Any, bounds: dict[str, Any]) -> None:
        schema = {"type": types, **bounds}
        texts = [drive.sample(drive.grammar("json_schema", schema), seed) for seed in range(12)]
        values = [json.loads(text) for text in texts if text is not None]
        assert values
        for value in values:
            jsonschema.validate(value, schema)

    def test_large_integers_are_not_shut_out(self, drive: GrammarDriver) -> None:
        for types in ("integer", ["integer", "null"]):
            schema = {"type": types, "minimum": -(2**63), "maximum": INT64}
            assert takes(drive, schema, 1234567890123456789) and not takes(drive, schema, 10**19)
        safe = {"type": "number", "minimum": -(2**53 - 1), "maximum": 2**53 - 1}
        assert takes(drive, safe, 2**53 - 1) and not takes(drive, safe, 2**53)


class TestGrammars:
    @pytest.mark.parametrize(
        "grammar",
        [
            '?start: item\n?item: "x" -> first\n  | "y" -> second\n',
            '%import common.WS\n%ignore WS\n!start: "x" | "y"',
            'ITEM: "x" | "y"\nstart : ITEM',
            'root ::= item\nitem ::= "x" | "y"',
        ],
    )
    def test_lark_is_told_from_gbnf(self, drive: GrammarDriver, grammar: str) -> None:
        for text, taken in (("x", True), ("y", True), ("z", False)):
            assert drive.takes(drive.grammar("lark", grammar), text) == taken

    def test_what_lark_has_and_the_compiler_lacks_is_named(self) -> None:
        assert "priority" in refusal("lark", 'start.2: "a"').message


class TestTextOfSpecialTokens:
    """Such text is written with ordinary tokens: the special token itself would end the output, or be no text."""

    @pytest.mark.parametrize(
        ("kind", "source", "texts"),
        [
            ("regex", r"<\|im_end\|>", ["<|im_end|>"]),
            ("regex", r"a<\|endoftext\|>b", ["a<|endoftext|>b"]),
            ("choice", ["<|im_end|>x", "<|im_start|>y"], ["<|im_end|>x", "<|im_start|>y"]),
            ("json_schema", {"const": "<|im_end|>"}, ['"<|im_end|>"']),
            ("lark", 'start: "x" "<|im_start|>" | "z"', ["x<|im_start|>", "z"]),
        ],
    )
    def test_can_be_the_only_way_on(self, drive: GrammarDriver, kind: str, source: Any, texts: list[str]) -> None:
        for seed in range(4):
            grammar = drive.grammar(kind, source)
            grammar.stop_ids = {2}  # <|im_end|>
            assert drive.sample(grammar, seed) in texts

    def test_the_token_itself_stays_where_it_is_meant(self, drive: GrammarDriver) -> None:
        grammar = drive.grammar("lark", 'start: <|im_end|> "a"')
        assert drive.allowed(grammar).tolist() == [2] and grammar.accept(2)
