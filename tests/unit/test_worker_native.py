"""The answer shape of the oldest workers."""

from __future__ import annotations

from typing import Any

from worker.answers.base import Frame
from worker.answers.native import NativeStream, NativeWhole
from worker.parsers.base import Content
from worker.pipeline import Finish, Step
from worker.protocol.responses import Head, Usage


def run(texts: list[str], *, first: int = 1, most: int = 50, growth: float = 3.0) -> list[Any]:
    """The batches of one choice whose steps have these texts, one token each."""
    sent: list[Any] = []
    tokens = 0
    frame = Frame(Head.chat("m"), sent.append, lambda: Usage(5, tokens))
    writer = NativeStream(frame, 1, first=first, most=most, growth=growth)
    for text in texts:
        tokens += 1
        last = tokens == len(texts)
        writer.step(0, Step((Content(text),) if text else (), (1,), finish=Finish("stop") if last else None))
    writer.close()
    return sent


def sizes(batches: list[Any]) -> list[int]:
    return [len(batch["choices"][0]["tokens"]) for batch in batches]


def test_batches_grow_up_to_the_limit() -> None:
    batches = run(["x"] * 150)
    assert sizes(batches) == [1, 3, 9, 27, 50, 50, 10]
    assert batches[0]["usage"] == {"input": 5, "output": 1} and batches[-1]["usage"]["output"] == 150


def test_batches_of_one_size() -> None:
    assert sizes(run(["x"] * 7, first=3, most=3)) == [3, 3, 1]


def test_the_last_usage_is_that_of_the_whole_answer() -> None:
    # The last token, an end of turn, has no text, and comes when everything has been sent.
    assert [batch["usage"]["output"] for batch in run(["x", ""])] == [1, 2]
    assert sizes(run([""])) == [0]


def test_whole() -> None:
    sent: list[Any] = []
    writer = NativeWhole(Frame(Head.chat("m"), sent.append, lambda: Usage(5, 3)), 2)
    for index, text in ((0, "a"), (1, "b"), (0, "c")):
        writer.step(index, Step((Content(text),), (1,)))
    writer.close()
    assert sent == [{"choices": [{"tokens": ["ac"]}, {"tokens": ["b"]}], "usage": {"input": 5, "output": 3}}]
