"""Every format: what comes out never depends on how the output was cut into pieces, and is what was put in."""

from __future__ import annotations

import json
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.parser_samples import ARGUMENTS, BARE, TOOLS, WRITERS, cuts, parse, said, tools_in
from worker.parsers.base import ToolCallArgs, ToolCallStart, Trail
from worker.parsers.names import HARMONY
from worker.parsers.registry import FORMATS, call_writer, tool_parser
from worker.parsers.tools.pythonic import Pythonic

ONE_AT_A_TIME = {"react", "internlm"}


def arguments(calls: list[tuple[str, str]]) -> list[tuple[str, object]]:
    return [(name, json.loads(text)) for name, text in calls]


def test_every_format_has_samples() -> None:
    assert set(WRITERS) == {*FORMATS, HARMONY}


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("given", ARGUMENTS, ids=str)
def test_one_call(format: str, given: dict[str, object]) -> None:
    content, _, calls = tools_in(format, WRITERS[format]([("f", given)]))
    assert content == "" and arguments(calls) == [("f", given)]


@pytest.mark.parametrize("format", WRITERS)
def test_several_calls(format: str) -> None:
    expected = [("f", {"n": 1, "text": "a"}), ("get_weather", {"city": "x"}), ("f", {})]
    content, _, calls = tools_in(format, WRITERS[format](expected))
    assert content == "" and arguments(calls) == expected


WRITTEN = [name for name, kind in FORMATS.items() if kind.shape is not None or issubclass(kind, Pythonic)]


@pytest.mark.parametrize("format", WRITTEN)
def test_calls_of_a_history_are_written_as_the_model_writes_them(format: str) -> None:
    given = [("f", arguments) for arguments in ARGUMENTS] + [("get_weather", {"city": 'a "b"', "n": [{"x": None}]})]
    for some in given:
        content, _, calls = said(parse(lambda: tool_parser(format, TOOLS), [call_writer(format)([some])]))
        assert content == "" and arguments(calls) == [some]
    several = [("f", {"n": 1, "text": "a"}), ("get_weather", {"city": "x"}), ("f", {})]
    content, _, calls = said(parse(lambda: tool_parser(format, TOOLS), [call_writer(format)(several)]))
    assert content == "" and arguments(calls) == several


@pytest.mark.parametrize("format", [name for name in WRITERS if name not in BARE])
def test_text_before_a_call(format: str) -> None:
    content, _, calls = tools_in(format, "Let me check.\n\n" + WRITERS[format]([("f", {"n": 1})]))
    assert content == "Let me check." and arguments(calls) == [("f", {"n": 1})]


@pytest.mark.parametrize("format", [name for name in WRITERS if name not in {"react", "harmony"}])
def test_text_behind_a_call(format: str) -> None:
    content, _, calls = tools_in(format, WRITERS[format]([("f", {"n": 1})]) + "\n\nWant more?")
    assert content.strip() == "Want more?" and arguments(calls) == [("f", {"n": 1})]


@pytest.mark.parametrize("format", WRITERS)
def test_a_call_of_an_unknown_tool_is_text(format: str) -> None:
    output = WRITERS[format]([("unknown", {"n": 1})])
    content, _, calls = tools_in(format, output)
    assert not calls
    if format == "harmony":  # the header goes, the body stays
        assert content == '{"n": 1}'
    else:
        assert content == output


@pytest.mark.parametrize("format", WRITERS)
def test_an_output_cut_anywhere_loses_nothing(format: str) -> None:
    """Either it is text, all of it, or a call whose arguments are the beginning of the whole ones."""
    given = {"text": 'a "b" c', "n": 12, "list": [1, "x"]}
    output = WRITERS[format]([("f", given)])
    _, _, ((_, whole),) = tools_in(format, output)
    for end in range(len(output)):
        results = {repr(said(parse(lambda: tool_parser(format, TOOLS), pieces))) for pieces in cuts(output[:end], 2)}
        assert len(results) == 1
        content, _, calls = said(parse(lambda: tool_parser(format, TOOLS), [output[:end]]))
        if calls:
            assert whole.startswith(calls[0][1]) and content == ""
        elif format != "harmony":
            assert content == output[:end]


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("text", ["", " \n", "plain text", "a < b [c] {d: 1}\n", "x\n\n  "])
def test_text_without_calls_is_left_as_it_is(format: str, text: str) -> None:
    assert tools_in(format, text) == (text, "", [])


STREAMED = {"react", "pythonic", "lfm2", "olmo3"}  # these wait for the end of a call


@pytest.mark.parametrize("format", [name for name in WRITERS if name not in STREAMED])
def test_arguments_stream_while_they_are_written(format: str) -> None:
    output = WRITERS[format]([("f", {"text": "word " * 50})])
    parser = tool_parser(format, TOOLS)
    before_end = [delta for char in output[: output.index("word ") + 100] for delta in parser.feed(char)]
    assert isinstance(before_end[0], ToolCallStart)
    assert sum(len(delta.fragment) for delta in before_end if isinstance(delta, ToolCallArgs)) > 80


# Text that is made of the formats' own pieces: the worst there is for hold-back.
PIECES = sorted({piece for kind in FORMATS.values() for piece in (*kind.starts, *kind.ends, *kind.opens, *kind.closes)})
SOUP = st.lists(
    st.one_of(
        st.sampled_from(
            [*PIECES, "<|channel|>", "<|message|>", "<|start|>", "<|call|>", "to=functions.f", "Action Input:"]
        ),
        st.sampled_from(
            ['{"name": "f", "arguments": ', '{"n": 1}', "}", "]", "[", "f", "(n=1)", "\n", " ", '"', "\\", "<", ","]
        ),
        st.text(max_size=3),
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("format", WRITERS)
@settings(max_examples=40, deadline=None)
@given(text=SOUP)
def test_no_soup_depends_on_the_cutting(format: str, text: str) -> None:
    results = {repr(said(parse(lambda: tool_parser(format, TOOLS), pieces))) for pieces in cuts(text, 3)}
    assert len(results) == 1, results


def test_a_long_run_of_spaces_is_held_in_linear_time() -> None:
    def seconds(length: int) -> float:
        trail, begun = Trail(), process_time()
        assert trail.add("a") == "a" and not any(map(trail.add, " " * length))
        assert trail.add("b") == " " * length + "b" and trail.take() == ""
        return process_time() - begun

    seconds(1000)
    assert seconds(400_000) < 2.0  # copying what is held for every character takes tens of seconds
