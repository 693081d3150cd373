"""The answer shape of the oldest workers: {"choices": [{"tokens": [...]}], "usage": {"input", "output"}}.

"tokens" are text deltas. Streamed, they come in batches that grow, by default 1, 3, 9, 27, 50, 50 ... deltas.
"""

from __future__ import annotations

from typing import Any

from worker.answers.base import Frame
from worker.pipeline import Step
from worker.protocol.responses import Usage


class NativeStream:
    def __init__(self, frame: Frame, num_choices: int, *, first: int, most: int, growth: float) -> None:
        self._frame = frame
        self._size = float(first)
        self._most = most
        self._growth = growth
        self._batch: list[list[str]] = [[] for _ in range(num_choices)]
        self._told: Usage | None = None  # in the last batch

    def step(self, index: int, step: Step) -> None:
        if step.content:
            self._batch[index].append(step.content)
        if sum(map(len, self._batch)) >= int(self._size):
            self._flush()
            self._size = min(self._size * self._growth, self._most)

    def close(self) -> None:
        # A last token without text still counts: the usage of the last batch is that of the whole answer.
        if any(self._batch) or self._told != self._frame.usage():
            self._flush()

    def _flush(self) -> None:
        self._frame.send(_body(self._frame, self._batch))
        self._batch = [[] for _ in self._batch]
        self._told = self._frame.usage()


class NativeWhole:
    def __init__(self, frame: Frame, num_choices: int) -> None:
        self._frame = frame
        self._texts = [""] * num_choices

    def step(self, index: int, step: Step) -> None:
        self._texts[index] += step.content

    def close(self) -> None:
        self._frame.send(_body(self._frame, [[text] for text in self._texts]))


def _body(frame: Frame, tokens: list[list[str]]) -> dict[str, Any]:
    usage = frame.usage()
    return {
        "choices": [{"tokens": texts} for texts in tokens],
        "usage": {"input": usage.prompt_tokens, "output": usage.completion_tokens},
    }
