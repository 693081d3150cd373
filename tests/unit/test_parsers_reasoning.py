"""Reasoning and answer told apart, and tool calls in what is the answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.parser_samples import TOOLS, cuts, parse, said, whole_output
from worker.parsers.base import Content, Reasoning, wants
from worker.parsers.reasoning import FAMILIES, THINK, ReasoningParser
from worker.parsers.registry import Formats, pipeline


def think(text: str, **options: object) -> tuple[str, str]:
    """(reasoning, content)"""
    content, reasoning, calls = whole_output("hermes", "think", text, **options)
    assert not calls
    return reasoning, content


class TestThink:
    @pytest.mark.parametrize(
        ("text", "reasoning", "content"),
        [
            ("<think>abc</think>def", "abc", "def"),
            ("<think>\nabc\n</think>\n\ndef", "abc", "def"),
            (" <think>abc</think>def", "abc", "def"),
            ("<think>not yet </th", "not yet </th", ""),
            ("<think>only thoughts", "only thoughts", ""),
            ("<think>only thoughts\n", "only thoughts\n", ""),
            ("bye <", "", "bye <"),
            ("<think>\n\n</think>\n\nhi", "", "hi"),
            ("</think>\n\nhi", "", "hi"),
            ("hi <think>x</think>", "", "hi <think>x</think>"),
            ("<think>a</think>b</think>c", "a", "b</think>c"),
            ("<thinking>a", "", "<thinking>a"),
            ("", "", ""),
            ("<think>", "", ""),
            ("\n\n", "", "\n\n"),
        ],
    )
    def test_split(self, text: str, reasoning: str, content: str) -> None:
        assert think(text) == (reasoning, content)

    @pytest.mark.parametrize("text", ["step 1</think>\n\n42", "\nstep 1\n</think>42", "<think>step 1</think>42"])
    def test_a_block_that_the_prompt_opened(self, text: str) -> None:
        assert think(text, prompt="<|im_start|>assistant\n<think>\n") == ("step 1", "42")

    def test_a_block_that_the_prompt_opened_and_the_output_never_closed(self) -> None:
        assert think("step 1 and", prompt="x<think>") == ("step 1 and", "")

    def test_a_block_that_the_prompt_closed(self) -> None:
        assert think("42</think>", prompt="<think>\n\n</think>\n\n") == ("", "42</think>")

    def test_the_users_own_words_open_nothing(self) -> None:
        assert think("42", prompt="user: what is <think> for?\nassistant:") == ("", "42")

    def test_a_begun_answer_of_the_requests(self) -> None:
        opened = "<think>I was"
        assert think(" saying</think>42", prompt=f"assistant:{opened}", prefill=opened) == ("saying", "42")
        closed = "<think>a</think>It is"
        assert think(" 42", prompt=f"assistant:{closed}", prefill=closed) == ("", " 42")

    def test_no_delta_holds_a_part_of_a_tag(self) -> None:
        parser = ReasoningParser(THINK, inside=False)
        pieces = ["<", "think", ">", "a", "</", "think", ">", "b"]
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.close()
        assert deltas == [Reasoning("a"), Content("b")]

    def test_always_inside(self) -> None:
        assert whole_output(None, "think_always", "a</think>b") == ("b", "a", [])
        assert whole_output(None, "think_always", "<think>a</think>b") == ("b", "a", [])
        assert whole_output(None, "think_always", "b", prompt="<think></think>") == ("b", "", [])


class TestCallsAndThoughts:
    CALL = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
    RESULT = [("f", '{"n": 1}')]  # noqa: RUF012

    def test_a_call_behind_the_thoughts(self) -> None:
        assert whole_output("hermes", "think", f"<think>hm</think>\n{self.CALL}") == ("", "hm", self.RESULT)

    def test_talk_of_a_call_within_the_thoughts_is_no_call(self) -> None:
        text = f"<think>I could write {self.CALL} but no</think>done"
        assert whole_output("hermes", "think", text) == ("done", f"I could write {self.CALL} but no", [])
        text = f"<think>maybe {self.CALL}</think>done"
        assert whole_output("hermes", "think", text) == ("done", f"maybe {self.CALL}", [])

    def test_a_call_that_ends_thoughts_which_are_never_closed(self) -> None:
        assert whole_output("hermes", "think", f"<think>hm\n{self.CALL}") == ("", "hm", self.RESULT)
        assert whole_output("hermes", "think", f"<think>hm {self.CALL}\n{self.CALL}\n") == ("", "hm", self.RESULT * 2)

    def test_the_last_of_several_in_unclosed_thoughts(self) -> None:
        text = f"<think>not {self.CALL} but {self.CALL}"
        assert whole_output("hermes", "think", text) == ("", f"not {self.CALL} but", self.RESULT)

    def test_talk_in_unclosed_thoughts_does_not_wait_for_the_end(self) -> None:
        parser = pipeline(Formats("hermes", "think"), TOOLS)
        shown = parser.feed(f"<think>maybe {self.CALL} but I am not sure")
        assert "not sure" in "".join(delta.text for delta in shown if isinstance(delta, Reasoning))

    def test_a_cut_call_in_unclosed_thoughts(self) -> None:
        text = '<think>hm <tool_call>{"name": "f", "arguments": {"n": 1'
        assert whole_output("hermes", "think", text) == ("", "hm", [("f", '{"n": 1')])
        text = '<think>hm <tool_call>{"name": "f'
        assert whole_output("hermes", "think", text) == ("", text.removeprefix("<think>"), [])

    def test_without_tools_markup_is_text(self) -> None:
        assert whole_output(None, "think", f"<think>a</think>{self.CALL}") == (self.CALL, "a", [])

    def test_a_bare_call_behind_the_thoughts(self) -> None:
        text = '<think>hm</think>\n\n{"name": "f", "parameters": {"n": 1}}'
        assert whole_output("llama3_json", "think", text) == ("", "hm", self.RESULT)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("mistral", "[THINK]abc[/THINK]def"),
        ("seed_oss", "<seed:think>abc</seed:think>def"),
        ("gemma4", "<|channel>thought\nabc\n<channel|>def"),
        ("gemma4", "<|channel>thoughtabc<channel|>def"),
        ("cohere", "<|START_THINKING|>abc<|END_THINKING|><|START_RESPONSE|>def<|END_RESPONSE|>"),
        ("kimi", "◁think▷abc◁/think▷def"),
        ("apertus", "<|inner_prefix|>abc<|inner_suffix|>def"),
        ("granite", "Here is my thought process:\nabc\n\nHere is my response:\ndef"),
        ("granite", "Here's my thought process: abc Here's my response: def"),
        ("response", "<think>abc</think><response>def</response>"),
        (
            "harmony",
            "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>def<|return|>",
        ),
    ],
)
def test_families(family: str, text: str) -> None:
    assert whole_output(None, family, text) == ("def", "abc", [])


@pytest.mark.parametrize("family", [name for name, tags in FAMILIES.items() if not tags.always])
def test_every_family_leaves_text_without_reasoning_alone(family: str) -> None:
    assert whole_output(None, family, "an answer") == ("an answer", "", [])


class TestSpecialTokens:
    TOKENS = ("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|im_end|>")

    def test_left_over_markers_do_not_reach_the_client(self) -> None:
        text = "a<|tool_call_argument_begin|>b<|tool_call_begin|>half"
        assert whole_output("kimi_k2", "think", text, special_tokens=self.TOKENS) == ("abhalf", "", [])

    def test_in_reasoning_too(self) -> None:
        text = "<think>a<|tool_call_end|>b</think>c<|tool_call_end|>"
        assert whole_output("kimi_k2", "think", text, special_tokens=self.TOKENS) == ("c", "ab", [])

    def test_tokens_that_the_parser_does_not_ask_for_are_not_its_business(self) -> None:
        parser = pipeline(Formats("kimi_k2", "think"), TOOLS, special_tokens=self.TOKENS)
        assert wants(parser, "<|tool_call_begin|>") and not wants(parser, "<|im_end|>")

    def test_markers_made_of_several_tokens(self) -> None:
        parser = pipeline(Formats("internlm", "gemma4"), TOOLS)
        assert wants(parser, "<|plugin|>") and wants(parser, "<|channel>")


TAGS = ["<think>", "</think>", "<think", "</", "<tool_call>", "</tool_call>", "<response>", "<|x|>", "\n", " ", "a"]
SOUP = st.lists(st.one_of(st.sampled_from([*TAGS, TestCallsAndThoughts.CALL]), st.text(max_size=2)), max_size=10)


@pytest.mark.parametrize("inside", [False, True])
@settings(max_examples=150, deadline=None)
@given(pieces=SOUP)
def test_no_soup_depends_on_the_cutting(inside: bool, pieces: list[str]) -> None:
    text, prompt = "".join(pieces), "<think>" if inside else ""
    formats = Formats("hermes", "response")
    results = {
        repr(said(parse(lambda: pipeline(formats, TOOLS, prompt=prompt, special_tokens=("<|x|>", "<tool_call>")), cut)))
        for cut in cuts(text, 3)
    }
    assert len(results) == 1, results
