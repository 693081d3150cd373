"""A sequence: what ends it, and what it derives from its tokens."""

from __future__ import annotations

import pytest

from engine.messages import FinishReason
from engine.sequence import Sequence
from tests.fakes.driver import request


def sequence(prompt: int = 4, **options: object) -> Sequence:
    return Sequence(request("r", range(100, 100 + prompt), **options), arrival=1, seed=0)  # type: ignore[arg-type]


def append_until_finish(seq: Sequence, tokens: list[int], max_len: int = 1000) -> tuple[FinishReason | None, int]:
    for count, token in enumerate(tokens, 1):
        if finish := seq.append(token, max_len):
            return finish, count
    return None, len(tokens)


def test_derived_counts() -> None:
    seq = sequence(prompt=4)
    seq.append(7, 1000)
    seq.append(8, 1000)
    assert (seq.num_prompt, seq.num_tokens, seq.num_output, seq.output_ids) == (4, 6, 2, [7, 8])


def test_the_prompt_of_the_request_is_not_changed_by_its_output() -> None:
    seq = sequence(prompt=4)
    seq.append(7, 1000)
    assert seq.request.prompt_ids == (100, 101, 102, 103)


@pytest.mark.parametrize(
    ("options", "max_len", "expected"),
    [
        ({"max_tokens": 3}, 1000, (FinishReason.LENGTH, 3)),
        ({"max_tokens": 1}, 1000, (FinishReason.LENGTH, 1)),
        ({"max_tokens": 50}, 9, (FinishReason.LENGTH, 5)),  # the context is full
        ({"max_tokens": 50, "stop_token_ids": frozenset({2})}, 1000, (FinishReason.STOP, 3)),
        ({"max_tokens": 3, "stop_token_ids": frozenset({2})}, 1000, (FinishReason.STOP, 3)),  # stop wins over length
        ({"max_tokens": 50, "stop_token_ids": frozenset({0, 4})}, 1000, (FinishReason.STOP, 1)),  # a set of them
        ({"max_tokens": 50, "stop_token_ids": frozenset({2, 5}), "min_tokens": 3}, 1000, (FinishReason.STOP, 6)),
        ({"max_tokens": 50, "stop_token_ids": frozenset({2}), "min_tokens": 2}, 1000, (FinishReason.STOP, 3)),
        ({"max_tokens": 50}, 1000, (None, 8)),
    ],
)
def test_what_ends_a_sequence(
    options: dict[str, object], max_len: int, expected: tuple[FinishReason | None, int]
) -> None:
    assert append_until_finish(sequence(prompt=4, **options), [0, 1, 2, 3, 4, 5, 6, 7], max_len) == expected


def test_order_is_priority_then_arrival() -> None:
    def order(priority: int, arrival: int) -> tuple[int, int]:
        return Sequence(request("r", [1], priority=priority), arrival, seed=0).order

    assert sorted([order(5, 1), order(0, 3), order(5, 2), order(-1, 4)]) == [(-1, 4), (0, 3), (5, 1), (5, 2)]


def test_sequences_are_compared_by_identity() -> None:
    assert sequence() != sequence()
