"""Log-probabilities of the raw distribution: of the token that was taken, of the best N, and of further ids.

R rows, V vocabulary, N the largest top count of the rows
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from torch import Tensor

from engine.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Wanted:
    """By one row."""

    top: int  # -1 = the whole vocabulary
    extra_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Logprobs:
    """Of R rows, still on the device."""

    token_ids: Tensor  # int64 [R]
    logprobs: Tensor  # float32 [R]
    ranks: Tensor  # int64 [R]
    top_ids: Tensor  # int64 [R, N], descending by log-probability, equal ones by id
    top_logprobs: Tensor  # float32 [R, N]
    extra: list[Tensor | None]  # float32 [len(extra_ids)] of each row
    wanted: Rows[Wanted]

    def to_list(self) -> list[TokenLogprobs]:
        tokens, logprobs, ranks = (each.tolist() for each in (self.token_ids, self.logprobs, self.ranks))
        top_ids, top_logprobs = self.top_ids.cpu(), self.top_logprobs.cpu()
        entries = []
        for row, (wanted, extra) in enumerate(zip(self.wanted, self.extra, strict=True)):
            count = wanted.top if wanted.top >= 0 else top_ids.shape[1]
            further = () if extra is None else extra.tolist()
            entries.append(
                TokenLogprobs(
                    token_ids=(tokens[row], *top_ids[row, :count].tolist(), *wanted.extra_ids),
                    logprobs=(logprobs[row], *top_logprobs[row, :count].tolist(), *further),
                    rank=ranks[row],
                )
            )
        return entries


def compute(logits: Tensor, token_ids: Tensor, wanted: Rows[Wanted]) -> Logprobs:
    """logits float32 [R, V] as the model gave them, the tokens taken int64 [R]"""
    vocab_size = logits.shape[1]
    total = logits.logsumexp(dim=-1, keepdim=True)
    taken = logits.gather(1, token_ids[:, None])
    count = max(vocab_size if each.top < 0 else min(each.top, vocab_size) for each in wanted)
    top_logits, top_ids = logits.topk(count)
    # Equal logits come in no particular order: settle it by id.
    top_ids, order = top_ids.sort(dim=-1)
    top_logits, order = top_logits.gather(1, order).sort(dim=-1, descending=True, stable=True)
    extra = [
        logits[row, list(each.extra_ids)] - total[row] if each.extra_ids else None for row, each in enumerate(wanted)
    ]
    return Logprobs(
        token_ids=token_ids,
        logprobs=(taken - total)[:, 0],
        ranks=(logits > taken).sum(dim=-1) + 1,
        top_ids=top_ids.gather(1, order),
        top_logprobs=top_logits - total,
        extra=extra,
        wanted=wanted,
    )
