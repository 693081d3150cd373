"""What requests do to their logits before a token is drawn: penalties, then bias, then masks.

Rows whose request asks for nothing are not touched. Per sequence only the ids it is about are kept (those of its
tokens, of its bias, ...), never a row of the vocabulary, and token counts grow with the sequence.

    S rows (sequences that draw), V vocabulary, N ids that a kind of adjustment touches over all rows
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import fill_rows
from engine.messages import RequestError
from engine.sequence import Sequence

Ids = NDArray[np.int64]


class TokenCounts:
    """The distinct tokens of a sequence and how often each is in the output; updated as tokens come."""

    def __init__(self, prompt: Rows[int]) -> None:
        self._ids: Ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._size = len(self._ids)
        self._index = {token: index for index, token in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """float32, of the output alone: 0 for a token that only the prompt has."""
        return self._counts[: self._size]

    def add(self, tokens: Rows[int]) -> None:
        for token in tokens:
            index = self._index.setdefault(token, self._size)
            if index == self._size:
                if index == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * index + 16)
                    self._counts = np.resize(self._counts, 2 * index + 16)
                self._ids[index], self._counts[index] = token, 0
                self._size += 1
            self._counts[index] += 1


class Adjustment:
    """Of one sequence. `active` is False if its logits never change."""

    def __init__(self, seq: Sequence) -> None:
        params = seq.params
        self.seq = seq
        self.penalizes = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.bias_ids: Ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.bias = np.array([value for _, value in params.logit_bias], dtype=np.float32)
        allowed = params.allowed_token_ids
        self.allowed: Ids | None = None if allowed is None else np.array(allowed, dtype=np.int64)
        self.stop_ids: Ids = np.array(sorted(params.stop_token_ids), dtype=np.int64)
        self.active = bool(
            self.penalizes or params.logit_bias or allowed is not None or params.bad_words
            or (params.min_tokens and params.stop_token_ids) or seq.grammar is not None
        )  # fmt: skip
        self._counts: TokenCounts | None = None
        self._num_counted = 0

    def counts(self) -> TokenCounts:
        """Of all tokens so far. The prompt matters to the repetition penalty only."""
        seq = self.seq
        if self._counts is None:
            self._counts = TokenCounts(seq.token_ids[: seq.num_prompt] if seq.params.repetition_penalty != 1.0 else ())
            self._num_counted = seq.num_prompt
        self._counts.add(seq.token_ids[self._num_counted :])
        self._num_counted = seq.num_tokens
        return self._counts

    def stops_hidden(self) -> bool:
        return self.seq.num_output < self.seq.params.min_tokens and len(self.stop_ids) > 0

    def bad_ids(self) -> list[int]:
        """Last tokens of the bad words whose other tokens have just been generated."""
        output = self.seq.token_ids[self.seq.num_prompt :][-max(map(len, self.seq.params.bad_words)) :]
        return [
            word[-1] for word in self.seq.params.bad_words
            if len(word) == 1 or tuple(output[1 - len(word) :]) == tuple(word[:-1])
        ]  # fmt: skip


def apply(logits: Tensor, rows: Rows[Adjustment]) -> dict[int, RequestError]:
    """Changes logits float32 [S, V] in place; `rows` has one adjustment a row. -> the rows whose grammar failed."""
    active = [(row, adjustment) for row, adjustment in enumerate(rows) if adjustment.active]
    if not active:
        return {}
    penalize(logits, [(row, each) for row, each in active if each.penalizes])
    _add_bias(logits, [(row, each) for row, each in active if len(each.bias)])
    for row, each in active:
        if each.allowed is not None:
            _allow_only(logits[row], each.allowed)
    failed = _mask_by_grammar(logits, [(row, each) for row, each in active if each.seq.grammar is not None])
    _mask_ids(logits, active)
    return failed


def penalize(logits: Tensor, rows: Rows[tuple[int, Adjustment]]) -> None:
    """Repetition over prompt and output: positive logits are divided, negative ones multiplied. Frequency and
    presence over the output: subtracted, the first times the count."""
    if not rows:
        return
    counts = [each.counts() for _, each in rows]
    sizes = [len(count.ids) for count in counts]
    per_row = np.array(
        [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for p in (each.seq.params for _, each in rows)
        ],
        dtype=np.float32,
    )
    table = np.concatenate([np.repeat(per_row, sizes, axis=0).T, [np.concatenate([c.counts for c in counts])]])
    repetition, frequency, presence, count = torch.from_numpy(table).to(logits.device)  # each float32 [N]
    index = _flat(logits, [row for row, _ in rows], [each.ids for each in counts])
    flat = logits.view(-1)
    values = flat[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[index] = values - frequency * count - presence * (count > 0)


def _add_bias(logits: Tensor, rows: Rows[tuple[int, Adjustment]]) -> None:
    if rows:
        index = _flat(logits, [row for row, _ in rows], [each.bias_ids for _, each in rows])
        bias = torch.from_numpy(np.concatenate([each.bias for _, each in rows])).to(logits.device)
        logits.view(-1).index_add_(0, index, bias)


def _allow_only(row: Tensor, ids: Ids) -> None:
    """row [V]"""
    allowed = torch.from_numpy(ids).to(row.device)
    kept = row[allowed]
    row.fill_(-torch.inf)
    row[allowed] = kept


def _mask_by_grammar(logits: Tensor, rows: Rows[tuple[int, Adjustment]]) -> dict[int, RequestError]:
    """Tokens beyond the width of a grammar's mask are forbidden: the padding of the vocabulary has no text."""
    grammars = [(row, each.seq.grammar) for row, each in rows if each.seq.grammar and each.seq.grammar.active]
    if not grammars:
        return {}
    words = np.zeros((len(grammars), -(-logits.shape[1] // 32)), dtype=np.int32)
    failed = fill_rows([(place, grammar) for place, (_, grammar) in enumerate(grammars)], words)
    masked = [place for place in range(len(grammars)) if place not in failed]
    _forbid(logits, [grammars[place][0] for place in masked], words[masked])
    return {grammars[place][0]: RequestError("grammar_failed", error.message) for place, error in failed.items()}


def _forbid(logits: Tensor, rows: list[int], words: NDArray[np.int32]) -> None:
    """In row rows[i] of `logits`, -inf wherever the bit of words[i] (int32[ceil(V / 32)]) is not set."""
    if not logits.is_cpu:
        forbid_on_device(logits, rows, words)
        return
    bits = np.unpackbits(~words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    for row, forbidden in zip(rows, bits.view(np.bool_), strict=True):
        np.putmask(logits[row].numpy(), forbidden, -np.inf)  # several times faster than torch's masked_fill_


def forbid_on_device(logits: Tensor, rows: list[int], words: NDArray[np.int32]) -> None:
    """The same where copying to the device costs most: the bits go there packed."""
    device, width = logits.device, logits.shape[1]
    packed = torch.from_numpy(words).to(device)
    bits = (packed[:, :, None] >> torch.arange(32, device=device)).view(len(rows), 32 * words.shape[1])[:, :width]
    index = torch.tensor(rows, dtype=torch.int64, device=device)
    logits[index] = logits[index].masked_fill((bits & 1) == 0, -torch.inf)


def _mask_ids(logits: Tensor, rows: Rows[tuple[int, Adjustment]]) -> None:
    """Bad words, and the stop ids as long as min_tokens is not reached."""
    hidden_rows, hidden_ids = [], []
    for row, each in rows:
        if each.seq.params.bad_words and (bad := each.bad_ids()):
            hidden_rows.append(row)
            hidden_ids.append(np.array(bad, dtype=np.int64))
        if each.stops_hidden() and not _only_stops_left(logits[row], each):
            hidden_rows.append(row)
            hidden_ids.append(each.stop_ids)
    if hidden_rows:
        logits.view(-1)[_flat(logits, hidden_rows, hidden_ids)] = -torch.inf


def _only_stops_left(row: Tensor, each: Adjustment) -> bool:
    """A complete grammar allows nothing but the end: then it ends, whatever min_tokens says."""
    if each.seq.grammar is None or not each.seq.grammar.active:
        return False
    others = row.clone()
    others[torch.from_numpy(each.stop_ids).to(row.device)] = -torch.inf
    return bool(others.max() == -torch.inf)


def _flat(logits: Tensor, rows: Rows[int], ids: Rows[Ids]) -> Tensor:
    """Index into logits.view(-1): ids[i] of the row rows[i], one after the other. int64 [N]"""
    offsets = np.repeat(np.array(rows, dtype=np.int64) * logits.shape[1], [len(each) for each in ids])
    return torch.from_numpy(offsets + np.concatenate(ids)).to(logits.device)
