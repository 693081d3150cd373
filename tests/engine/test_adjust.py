"""Penalties, bias and masks against their definitions, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import adjust
from engine.adjust import Adjustment, TokenCounts
from engine.grammar import GrammarError
from engine.messages import Request, SamplingParams
from engine.sequence import Sequence

INF = float("inf")


def sequence(prompt=(0,), output=(), grammar=None, **params) -> Sequence:
    seq = Sequence(Request("r", tuple(prompt), SamplingParams(max_tokens=99, **params)), 0, 0, grammar)
    seq.token_ids += output
    return seq


def adjusted(logits: list[list[float]], *seqs: Sequence) -> tuple[list[list[float]], dict]:
    tensor = torch.tensor(logits)
    failed = adjust.apply(tensor, [Adjustment(seq) for seq in seqs])
    return tensor.tolist(), failed


def slow_penalties(logits: list[float], seq: Sequence) -> list[float]:
    params, output = seq.params, seq.output_ids
    result = []
    for token, value in enumerate(logits):
        if token in seq.token_ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = output.count(token)
        result.append(value - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return result


def test_repetition_sees_prompt_and_output_the_others_only_the_output():
    seq = sequence([0], [1, 1], repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    assert adjusted([[4.0, -4.0, 1.0]], seq)[0] == [[2.0, -9.25, 1.0]]


def test_penalties_equal_their_definition_as_the_output_grows():
    """Counts are kept from step to step and rows share one pass: they must stay those of a fresh count."""
    rng = np.random.default_rng(0)
    seqs = [
        sequence(rng.integers(0, 50, 9), repetition_penalty=1.3, frequency_penalty=0.2),
        sequence(rng.integers(0, 50, 9)),
        sequence(rng.integers(0, 50, 9), presence_penalty=-0.7, frequency_penalty=0.4),
        sequence(rng.integers(0, 50, 9), repetition_penalty=0.8),
    ]
    kept = [Adjustment(seq) for seq in seqs]
    for _ in range(60):
        logits = torch.from_numpy(rng.normal(size=(4, 50)).astype(np.float32))
        expected = [slow_penalties(values, seq) for values, seq in zip(logits.tolist(), seqs, strict=True)]
        adjust.apply(logits, kept)
        np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-6)
        for seq in seqs:
            seq.token_ids += rng.integers(0, 50, rng.integers(0, 3)).tolist()


def test_token_counts_hold_distinct_tokens_only():
    counts = TokenCounts([5, 5, 3])
    counts.add([7, 5, 7] * 1000)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {3: 0, 5: 1000, 7: 2000}


def test_bias_is_added_at_every_step_and_minus_infinity_stays():
    seq = sequence(logit_bias=((2, 100.0), (0, -100.0), (1, 5.0)))
    kept = Adjustment(seq)
    for _ in range(2):
        logits = torch.tensor([[1.0, -INF, 0.5, 0.0]])
        adjust.apply(logits, [kept])
        assert logits.tolist() == [[-99.0, -INF, 100.5, 0.0]]


def test_allowed_ids_leave_nothing_else_and_neighbours_alone():
    rows, _ = adjusted([[1.0, 2.0, 3.0]] * 2, sequence(allowed_token_ids=(0, 2)), sequence())
    assert rows == [[1.0, -INF, 3.0], [1.0, 2.0, 3.0]]


def test_bad_words_mask_their_last_token_once_the_others_are_there():
    words = ((3,), (1, 2), (0, 1, 0))
    masked = {
        (): {3},
        (1,): {3, 2},
        (0, 1): {3, 2, 0},
        (1, 0): {3},
    }
    for output, tokens in masked.items():
        rows, _ = adjusted([[0.0] * 5], sequence([1], output, bad_words=words))
        assert {i for i, value in enumerate(rows[0]) if value == -INF} == tokens, output


def test_stop_ids_are_masked_until_min_tokens_are_there():
    for output, masked in (((), True), ((0,), True), ((0, 0), False)):
        seq = sequence(output=output, min_tokens=2, stop_token_ids=frozenset({1, 4}))
        assert adjusted([[0.0] * 5], seq)[0] == [[0.0, -INF, 0.0, 0.0, -INF] if masked else [0.0] * 5]


class AllowIds:
    """A grammar that allows the given ids."""

    def __init__(self, ids, active=True, fails=False):
        self.ids, self.active, self.done, self.fails = ids, active, False, fails

    def fits(self, num_words):
        return False

    def fill(self, row):
        if self.fails:
            raise GrammarError("too deep")
        assert row.dtype == np.int32 and not row.any()
        for token in self.ids:
            row[token // 32] |= np.array(1 << (token % 32), dtype=np.uint32).astype(np.int32)


def test_grammar_masks_only_rows_that_need_one():
    seqs = (
        sequence(grammar=AllowIds([0, 31, 39])),
        sequence(),
        sequence(grammar=AllowIds([1], active=False)),
        sequence(grammar=AllowIds([2], fails=True)),
        sequence(grammar=AllowIds([38])),
    )
    rows, failed = adjusted([[1.0] * 40] * 5, *seqs)
    allowed = [[i for i, value in enumerate(values) if value == 1.0] for values in rows]
    assert allowed[:3] == [[0, 31, 39], list(range(40)), list(range(40))] and allowed[4] == [38]
    assert {row: error.code for row, error in failed.items()} == {3: "grammar_failed"}


@pytest.mark.parametrize("rows", [[], [0], [2, 0], [0, 1, 2]])
def test_masks_unpacked_on_the_device_equal_those_unpacked_here(rows):
    random = np.random.default_rng(0)
    words = random.integers(-(2**31), 2**31, (len(rows), 3), dtype=np.int64).astype(np.int32)
    here, there = torch.rand(3, 70), torch.empty(3, 70)
    there.copy_(here)
    adjust._forbid(here, rows, words)
    adjust.forbid_on_device(there, rows, words)
    assert torch.equal(here, there) and bool((here == -INF).any()) == bool(rows)


def test_min_tokens_does_not_take_the_last_way_out_of_a_complete_grammar():
    """The grammar is complete and allows only the end; min_tokens forbids the end: then the grammar wins."""
    complete = sequence(grammar=AllowIds([4]), min_tokens=64, stop_token_ids=frozenset({4}))
    going_on = sequence(grammar=AllowIds([2, 4]), min_tokens=64, stop_token_ids=frozenset({4}))
    rows, failed = adjusted([[1.0] * 5] * 2, complete, going_on)
    assert rows == [[-INF, -INF, -INF, -INF, 1.0], [-INF, -INF, 1.0, -INF, -INF]] and not failed
