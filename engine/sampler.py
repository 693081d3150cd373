"""Draws one token a row. Pure functions on [S, V]: no state, no order of rows, nothing known of requests.

A row is turned into weights w = exp((logit - largest) / temperature), so that the best token weighs 1. Top-k, top-p
and min-p each become a lower bound of the weight, and the largest bound wins:

    top-k   the k-th largest weight                                   tokens that tie with it stay
    top-p   the smallest weight of the heaviest tokens that together hold the share p (of what top-k left)
    min-p   min_p itself

So nothing is sorted but a few candidates, and one draw serves all: the token at which the cumulated weight reaches
u * total, in the order of ids. u comes from a hash of (seed, choice, position) and so does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_CANDIDATES = 64  # top-p looks at so many of the heaviest tokens; then at all
_STRIDE = 256  # the cumulated weight is searched by stretches of so many ids, then within one

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row is drawn."""

    temperature: float
    top_k: int  # 0 = off
    top_p: float
    min_p: float
    key: int  # of the random numbers: stream_key(seed, choice)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


def sample(logits: Tensor, rows: Rows[Sampling], positions: Rows[int]) -> tuple[Tensor, Tensor]:
    """logits float32 [S, V], masked tokens at -inf; positions[i]: how many tokens row i has drawn before.

    -> token ids int64 [S], and the largest logits float32 [S]: not finite for a row from which nothing can be drawn
    (-inf: all tokens are masked; else a logit is NaN or +inf). Greedy rows, and those of top_k 1, take the largest
    logit, the first of equal ones.
    """
    best, token_ids = logits.max(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not row.greedy]
    if drawn:
        whole = len(drawn) == len(rows)
        at = torch.tensor(drawn, device=logits.device)
        selected = logits if whole else logits[at]
        chosen = [rows[index] for index in drawn]
        uniform = uniforms([row.key for row in chosen], [positions[index] for index in drawn])
        temperature = torch.tensor([row.temperature for row in chosen], device=logits.device)
        weights = weigh(selected, best if whole else best[at], temperature)
        truncate(weights, chosen)
        token_ids[at] = draw(weights, torch.from_numpy(uniform).to(logits.device))
    return token_ids, best


def weigh(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """logits [S, V], their maximum [S], temperature [S] > 0 -> weights float32 [S, V], the largest 1."""
    return ((logits - best[:, None]) / temperature[:, None]).exp_()


def truncate(weights: Tensor, rows: Rows[Sampling]) -> None:
    """Sets to zero, in place, the weights [S, V] that top-k, top-p or min-p exclude."""
    vocab_size = weights.shape[1]
    bound = torch.tensor([row.min_p for row in rows], device=weights.device)
    by_k = [index for index, row in enumerate(rows) if 0 < row.top_k < vocab_size]
    if by_k:
        kth = torch.zeros_like(bound)
        kth[by_k] = _kth_largest(_take(weights, by_k), [rows[index].top_k for index in by_k])
        weights.masked_fill_(weights < kth[:, None], 0.0)
    by_p = [index for index, row in enumerate(rows) if row.top_p < 1.0]
    if by_p:
        top_p = torch.tensor([rows[index].top_p for index in by_p], dtype=torch.float64, device=weights.device)
        bound[by_p] = bound[by_p].maximum(nucleus(_take(weights, by_p), top_p))
    if by_p or any(row.min_p > 0.0 for row in rows):
        weights.masked_fill_(weights < bound[:, None], 0.0)


def _take(weights: Tensor, rows: list[int]) -> Tensor:
    return weights if len(rows) == weights.shape[0] else weights[rows]


def _kth_largest(weights: Tensor, top_k: list[int]) -> Tensor:
    """[S, V] -> [S]. A row with a large k does not make the others pay."""
    small = [k for k in top_k if k <= _NUM_CANDIDATES]
    kth = weights.new_empty(len(top_k))
    for index, k in enumerate(top_k):
        if k > _NUM_CANDIDATES:
            kth[index] = weights[index].topk(k, sorted=False).values.min()
    if small:
        at = [index for index, k in enumerate(top_k) if k <= _NUM_CANDIDATES]
        largest = _take(weights, at).topk(max(small)).values
        kth[at] = largest.gather(1, torch.tensor(small, device=weights.device)[:, None] - 1)[:, 0]
    return kth


def nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """weights [S, V] of [0, 1], top_p float64 [S] < 1 -> [S]: the lightest of the heaviest that together hold top_p.

    Exact: rows whose candidates do not hold the share are looked at as a whole.
    """
    target = top_p * weights.sum(dim=-1, dtype=torch.float64)
    heaviest = weights.topk(min(_NUM_CANDIDATES, weights.shape[1])).values
    share = heaviest.cumsum(dim=-1, dtype=torch.float64)
    bound = heaviest.gather(1, torch.searchsorted(share, target[:, None]).clamp_(max=heaviest.shape[1] - 1))[:, 0]
    open_rows = (share[:, -1] < target).nonzero()[:, 0]
    if len(open_rows):
        bound[open_rows] = _nucleus_by_buckets(_take(weights, open_rows.tolist()), target[open_rows])
    return bound


def _nucleus_by_buckets(weights: Tensor, target: Tensor) -> Tensor:
    """weights [S, V] of [0, 1], target float64 [S]: as `nucleus`. Only the bucket that holds the bound is sorted.

    A bucket is the weights with the same exponent and first five bits of mantissa.
    """
    bucket = (weights.view(torch.int32) >> 18).long()
    num_buckets = (0x3F800000 >> 18) + 1  # that of 1.0 is the last
    held = torch.zeros(weights.shape[0], num_buckets, dtype=torch.float64, device=weights.device)
    held.scatter_add_(1, bucket, weights.double())
    share = held.flip(1).cumsum(dim=-1)  # from the heaviest bucket on
    steps = torch.searchsorted(share, target[:, None]).clamp_(max=num_buckets - 1)
    heavier = share.gather(1, steps) - held.flip(1).gather(1, steps)
    inside = bucket == num_buckets - 1 - steps
    sorted_inside = weights.masked_fill(~inside, 0.0).topk(int(inside.sum(dim=-1).max())).values
    share = sorted_inside.cumsum(dim=-1, dtype=torch.float64) + heavier
    cut = torch.searchsorted(share, target[:, None])
    return sorted_inside.gather(1, cut.minimum(inside.sum(dim=-1, keepdim=True) - 1))[:, 0]


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """weights [S, V] >= 0, uniform float64 [S] in (0, 1) -> token ids int64 [S], by inverse of the cumulated weight.

    Found is the first id whose cumulated weight is not below a positive target, so one of weight 0 never is.
    """
    vocab_size = weights.shape[1]
    even = vocab_size // _STRIDE * _STRIDE
    sums = [weights[:, :even].unflatten(1, (-1, _STRIDE)).sum(dim=-1)] if even else []
    if even < vocab_size:
        sums.append(weights[:, even:].sum(dim=-1, keepdim=True))
    cumulated = torch.cat(sums, dim=1).cumsum(dim=-1, dtype=torch.float64)  # [S, stretches]
    target = uniform[:, None] * cumulated[:, -1:]
    stretch = torch.searchsorted(cumulated, target).clamp_(max=cumulated.shape[1] - 1)
    before = torch.where(stretch > 0, cumulated.gather(1, (stretch - 1).clamp_(min=0)), 0.0)
    ids = stretch * _STRIDE + torch.arange(_STRIDE, device=weights.device)
    inner = weights.gather(1, ids.clamp(max=vocab_size - 1)).masked_fill_(ids >= vocab_size, 0.0)
    inner = inner.cumsum(dim=-1, dtype=torch.float64)
    # The sum of a stretch is rounded differently there and here: the target may lie just above all of it.
    offset = torch.searchsorted(inner, torch.minimum(target - before, inner[:, -1:]))
    return (stretch * _STRIDE + offset)[:, 0].clamp_(max=vocab_size - 1)


def stream_key(seed: int, choice: int) -> int:
    """Names the random numbers of one sequence. Any integer is a seed."""
    return _mix(_mix(seed & _MASK) ^ ((choice + 1) * _GOLDEN & _MASK))


def uniforms(keys: Rows[int], positions: Rows[int]) -> NDArray[np.float64]:
    """One number of (0, 1) a row: a hash of its key and its position (splitmix64)."""
    with np.errstate(over="ignore"):
        z = np.array(keys, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
