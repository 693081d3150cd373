"""From the engine's outputs to steps: stops, logprobs, parsers, together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine.messages import FinishReason, SequenceOutput, TokenLogprobs
from worker.detokenizer import Detokenizer
from worker.parsers.base import Content, Delta, Parser, Reasoning, ToolCallArgs, ToolCallStart, merge
from worker.parsers.registry import Formats, pipeline
from worker.pipeline import Finish, OutputPipeline, Step, StopRules
from worker.tokenizer import Tokenizer

EOS = "<eos>"
ANALYSIS = ["<|channel|>", "analysis", "<|message|>", "one", "<|end|>", "<|start|>", "assistant", "<|channel|>"]


def run(
    pieces: Sequence[str],
    *,
    finish: FinishReason | None = FinishReason.STOP,
    stop_piece: str | None = None,
    parser: Parser | None = None,
    show_stop: bool = False,
    reported: Sequence[Any] = (),
    each: int = 1,
    **options: Any,
) -> list[Step]:
    """Feeds `pieces` as tokens, `each` at a time; the last output has the finish."""
    names = list(dict.fromkeys([EOS, *pieces]))
    backend = Backend(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=EOS))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    backend.add_special_tokens([EOS])
    tokenizer = Tokenizer(json.loads(backend.to_str()), {})
    ids = [names.index(piece) for piece in pieces]
    output_pipeline = OutputPipeline(
        Detokenizer(tokenizer, include_stop_str=show_stop, **options), parser, StopRules(frozenset(reported), show_stop)
    )
    steps = []
    for start in range(0, len(ids), each):
        part = tuple(ids[start : start + each])
        last = start + each >= len(ids)
        output = SequenceOutput(
            "r",
            part,
            tuple(TokenLogprobs((i,), (-1.0,), 1) for i in part),
            finish=finish if last else None,
            stop_token_id=names.index(stop_piece) if last and stop_piece is not None else None,
        )
        steps.append(output_pipeline.feed(output))
        if steps[-1].finish is not None:
            break
    return steps


def text(steps: Sequence[Step]) -> str:
    return "".join(step.content for step in steps)


def test_every_token_has_its_logprobs_although_its_text_waits() -> None:
    steps = run(["a", "\nGue", "st", "x", EOS], stop_piece=EOS, stop=["\nGuest:"])
    assert text(steps) == "a\nGuestx"
    assert [len(step.logprobs) for step in steps] == [1, 1, 1, 1, 1]
    assert steps[1].deltas == () and steps[-1].finish == Finish("stop")


def test_a_stop_string_inside_an_output_of_several_tokens() -> None:
    for each in (1, 2, 3, 5):
        steps = run(
            ["A", " silver", " river", " bends", " west"], each=each, stop=["ver bends"], reported=["ver bends"]
        )
        assert text(steps) == "A silver ri"
        assert steps[-1].finish == Finish("stop", "ver bends")
        assert sum(len(step.token_ids) for step in steps) == sum(len(step.logprobs) for step in steps) == 4


def test_a_template_s_stop_word_is_no_stop_reason() -> None:
    assert run(["a", "END", "b"], stop=["END"])[-1].finish == Finish("stop", None)


def test_the_stop_token_is_counted_and_its_text_hidden() -> None:
    steps = run(["a", ".", "b"], stop_piece="b", reported=[3])
    assert (text(steps), steps[-1].finish) == ("a.", Finish("stop", 3))
    assert sum(len(step.token_ids) for step in steps) == 3
    assert text(run(["a", ".", "b"], stop_piece="b", show_stop=True)) == "a.b"
    shown = run(["a", EOS], stop_piece=EOS, show_stop=True, skip_special_tokens=False)
    assert text(shown) == "a<eos>"


def test_length_flushes_what_was_held() -> None:
    steps = run(["red", " blue"], finish=FinishReason.LENGTH, stop=["blue\nZZ"])
    assert (text(steps), steps[-1].finish) == ("red blue", Finish("length"))


def test_held_text_goes_through_the_parsers() -> None:
    pieces = ["<think>", "plan", "</think>", "ans", "wer", "<tool_", "call>", '{"name": "f", "arguments": {}}']
    pieces += ["</tool", "_call>"]
    parser = pipeline(Formats("hermes", "think"), {"f": None})
    steps = run([*pieces, EOS], stop_piece=EOS, parser=parser, stop=["</tool_call>X"])
    deltas: list[Delta] = merge(delta for step in steps for delta in step.deltas)
    assert [delta for delta in deltas if isinstance(delta, Content | Reasoning)] == [
        Reasoning("plan"),
        Content("answer"),
    ]
    assert [delta.name for delta in deltas if isinstance(delta, ToolCallStart)] == ["f"]
    assert "".join(delta.fragment for delta in deltas if isinstance(delta, ToolCallArgs)) == "{}"


def test_reasoning_tokens_are_counted() -> None:
    pieces = ["<think>", "one", " two", "</think>", "answer", EOS]
    steps = run(pieces, stop_piece=EOS, parser=pipeline(Formats(None, "think"), {}))
    assert 2 <= sum(step.reasoning_tokens for step in steps) <= 4


@pytest.mark.parametrize(
    ("formats", "pieces", "thoughts"),
    [
        (
            Formats("hermes", "think"),
            ["<think>", "one", "</think>", "<tool_call>", '{"name"', ': "f"', ', "arguments"', ": {}}", "</tool_call>"],
            2,
        ),
        (
            Formats("harmony", "harmony"),
            [*ANALYSIS, "commentary", " to=functions", ".f", "<|message|>", "{", "}", "<|call|>"],
            2,
        ),
        (
            Formats("harmony", "harmony"),
            [*ANALYSIS, *ANALYSIS[1:], "final", "<|message|>", "two"],
            4,
        ),
    ],
)
def test_what_is_held_back_behind_thoughts_is_not_counted_as_such(
    formats: Formats, pieces: list[str], thoughts: int
) -> None:
    """The thoughts' text and what closes them; not the beginning of a call, which shows nothing until its name is
    known."""
    for each in (1, 3, 99):
        steps = run([*pieces, EOS], stop_piece=EOS, parser=pipeline(formats, {"f": None}), each=each)
        assert sum(step.reasoning_tokens for step in steps) == thoughts


def test_steps_add_up() -> None:
    steps = run(["a", "b", "c", EOS], stop_piece=EOS)
    total = steps[0]
    for step in steps[1:]:
        total += step
    (once,) = run(["a", "b", "c", EOS], stop_piece=EOS, each=9)
    assert total == once
