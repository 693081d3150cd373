"""Log-probabilities against log_softmax and a full sort."""

from __future__ import annotations

import torch

from engine import logprobs
from engine.logprobs import Wanted


def test_entries_equal_log_softmax_and_a_full_sort():
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * 3
    logits[1, 100:300] = -torch.inf
    taken = torch.tensor([4, 5, 6, 7, 8])
    taken[2] = logits[2].argmax()
    wanted = [Wanted(3), Wanted(0), Wanted(1), Wanted(-1), Wanted(2, (9, 150))]
    entries = logprobs.compute(logits, taken, wanted).to_list()
    exact = torch.log_softmax(logits.double(), dim=-1)
    for row, (entry, want) in enumerate(zip(entries, wanted, strict=True)):
        ranking = sorted(range(700), key=lambda token, row=row: (-exact[row, token], token))
        top = ranking[: want.top] if want.top >= 0 else ranking
        assert entry.token_ids == (taken[row].item(), *top, *want.extra_ids)
        assert torch.allclose(torch.tensor(entry.logprobs).double(), exact[row, list(entry.token_ids)], atol=1e-5)
        assert entry.rank == ranking.index(taken[row].item()) + 1
    assert entries[2].token_ids[0] == entries[2].token_ids[1] and entries[2].logprobs[0] == entries[2].logprobs[1]


def test_top_entries_are_distinct_and_equal_logits_are_ordered_by_id():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0]])
    entry = logprobs.compute(logits, torch.tensor([1]), [Wanted(4)]).to_list()[0]
    assert entry.token_ids == (1, 1, 2, 4, 3) and entry.rank == 1


def test_an_impossible_token_has_minus_infinity_not_nan():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    entry = logprobs.compute(logits, torch.tensor([1]), [Wanted(3)]).to_list()[0]
    assert entry.logprobs[0] == entry.logprobs[-1] == -torch.inf and entry.rank == 3
