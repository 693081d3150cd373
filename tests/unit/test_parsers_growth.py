"""The work on an output grows no faster than its length, whatever a model was talked into writing.

What counts is calls of functions, not time: so many a character, however long the output. Copies of what is held are
no calls: for them a long output is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from time import process_time
from typing import Any

import pytest

from tests.unit.parser_samples import TOOLS, WRITERS, parse, said
from worker.parsers.base import Parser
from worker.parsers.names import HARMONY
from worker.parsers.registry import FORMATS, Formats, formats, pipeline, tool_parser

CHARS = 3000
# A parser's share is up to 120, with thoughts around it up to 240. One that reads the rest again for each beginning of
# a call comes to several hundred.
MOST_OF_CALLS, MOST_OF_THOUGHTS = 160, 280
CALLS = {name: write([("f", {"text": "a b", "n": 1, "list": [1]})]) for name, write in WRITERS.items()}
# What a model may write behind a marker, again and again: beginnings of values that never end.
OPENINGS = ("", '{"a": [', '{"function": ', "f(")
RUNS = (" ", "<", "\\", '{"function": ')


def markers(format: str) -> tuple[str, ...]:
    if format == HARMONY:
        return ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
    kind = FORMATS[format]
    return tuple(dict.fromkeys((*kind.starts[:1], *kind.opens[:1], *kind.ends[:1])))


def hostile(format: str) -> Iterator[tuple[str, str]]:
    """(beginning, what is repeated behind it)"""
    first = next(iter(markers(format)), "")
    yield from (("", marker + opening) for marker in markers(format) for opening in OPENINGS)
    yield from ((first, run) for run in RUNS)
    call = CALLS[format]
    yield from (("", call[: len(call) * quarters // 4]) for quarters in (2, 3, 4))
    yield "", WRITERS[format]([("nobody", {"n": 1})])


def calls_per_char(make: Callable[[], Parser], pieces: Iterable[str]) -> float:
    count = length = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += 1

    parser = make()
    sys.setprofile(note)
    try:
        for piece in pieces:
            length += len(piece)
            parser.feed(piece)
        parser.close()
    finally:
        sys.setprofile(None)
    return count / length


def assert_linear(make: Callable[[], Parser], most: int, before: str, repeated: str, after: str = "") -> None:
    share = calls_per_char(make, before + repeated * (CHARS // len(repeated)) + after)
    assert share < most, (before, repeated, share)


@pytest.mark.parametrize("format", WRITERS)
def test_calls_and_half_calls_without_end(format: str) -> None:
    for before, repeated in hostile(format):
        assert_linear(lambda: tool_parser(format, TOOLS), MOST_OF_CALLS, before, repeated)


@pytest.mark.parametrize("format", ["hermes", "kimi_k2"])
@pytest.mark.parametrize("after", ["", "</think>", " x"])
def test_the_same_within_thoughts(format: str, after: str) -> None:
    """Which also reads calls on trial."""

    def make() -> Parser:
        return pipeline(Formats(format, "think"), TOOLS, special_tokens=("<tool_call>",))

    for before, repeated in hostile(format):
        assert_linear(make, MOST_OF_THOUGHTS, "<think>" + before, repeated, after)


@pytest.mark.parametrize(
    "repeated", [" ", "a ", '<<call {"name": "f", "args": {}}>>', "<<call", "<<call >>", "<reason>"]
)
def test_a_checkpoints_own_description(repeated: str) -> None:
    template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "<reason>", "close": "</reason>"},
            "content": {},
            "tool_calls": {"open": "<<call ", "close": ">>", "content": "json", "repeats": True},
        },
    }
    found = formats("", response_template=template)
    assert_linear(lambda: pipeline(found, TOOLS, prompt="<|assistant|>"), MOST_OF_CALLS, "", repeated)


HELD = {
    "react": '\nAction: f\nAction Input: {"text": "',
    "hermes": '<tool_call>{"arguments": {"text": "',
    "pythonic": '[f(text="',
    "glm45": "<tool_call>",
}


@pytest.mark.parametrize("format", HELD)
def test_text_that_is_held_to_the_end_is_not_copied_for_every_piece(format: str) -> None:
    def seconds(num_pieces: int) -> float:
        parser, begun = tool_parser(format, TOOLS), process_time()
        assert not parser.feed(HELD[format])
        for _ in range(num_pieces):
            assert not parser.feed("x" * 40)
        return process_time() - begun

    seconds(1000)
    assert seconds(40_000) < 10 * seconds(10_000)


def test_very_many_beginnings_end_as_text_and_nothing_is_lost() -> None:
    text = '<tool_call>{"a": [' * 2000
    for pieces in (list(text), [text]):
        assert said(parse(lambda: tool_parser("hermes", TOOLS), pieces)) == (text, "", [])


def test_a_call_behind_many_broken_ones_is_found() -> None:
    broken = '<tool_call>{"name": "nobody", "arguments": {"n": 1}}</tool_call>\n'
    text = broken * 500 + CALLS["hermes"]
    for pieces in (list(text), [text]):
        content, _, calls = said(parse(lambda: tool_parser("hermes", TOOLS), pieces))
        assert content == (broken * 500).rstrip() and len(calls) == 1
