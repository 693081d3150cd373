"""A plan as tensors: what one forward pass reads.

    T tokens of the step, B parts (one a sequence), P pages of the longest sequence, S rows whose logits are drawn from

Built with a handful of calls from lists: nothing here is done once a token in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend, LayerSpec
from engine.kv import KVPool

if TYPE_CHECKING:
    from engine.scheduler import Part, Plan


@dataclass(slots=True)
class Batch:
    """The tokens of all parts, one after the other: first the parts of one token, longest context first, then the
    others. Arrays are on the CPU.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: page * page_size + offset, where the token's keys and values go
    logits_at: Tensor  # int64 [S]: rows of the last tokens of the parts that sample, in the plan's order
    first_row: NDArray[np.int64]  # [B]: of each part of the plan, in the plan's order
    q_start: NDArray[np.int64]  # [B + 1]: part b has the rows [q_start[b], q_start[b + 1])
    kv_len: NDArray[np.int64]  # [B]: tokens of the sequence after this step
    page_table: NDArray[np.int64]  # [B, P]; beyond a sequence's pages: the pool's padding page
    backend: AttentionBackend
    pool: KVPool
    plan: Any = field(init=False)  # the backend's own index tensors

    def __post_init__(self) -> None:
        self.plan = self.backend.prepare(self, self.pool)

    def attend(
        self, layer: int, spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        return self.backend.run(layer, spec, query, key, value, sinks, self.pool, self.plan)


def build(plan: Plan, backend: AttentionBackend, pool: KVPool) -> Batch:
    start = np.array([part.start for part in plan.parts], dtype=np.int64)
    count = np.array([part.count for part in plan.parts], dtype=np.int64)
    order = np.lexsort((-start, count != 1))
    parts = [plan.parts[index] for index in order.tolist()]
    start, count = start[order], count[order]
    tokens: list[int] = []
    for part in parts:
        tokens += part.seq.token_ids[part.start : part.start + part.count]
    q_start = np.concatenate([[0], np.cumsum(count)])
    kv_len = start + count
    page_table = _page_table(parts, kv_len, pool)

    row = np.repeat(np.arange(len(parts)), count)
    positions = np.arange(len(tokens)) + (start - q_start[:-1])[row]
    page, offset = np.divmod(positions, pool.page_size)
    slots = page_table[row, page] * pool.page_size + offset
    first_row, last_row = np.empty_like(order), np.empty_like(order)
    first_row[order], last_row[order] = q_start[:-1], q_start[1:] - 1
    samples = np.array([part.samples for part in plan.parts], dtype=bool)
    packed = torch.from_numpy(np.stack([np.array(tokens, dtype=np.int64), positions, slots])).to(pool.device)
    return Batch(
        token_ids=packed[0],
        positions=packed[1],
        slots=packed[2],
        logits_at=torch.from_numpy(last_row[samples]).to(pool.device),
        first_row=first_row,
        q_start=q_start,
        kv_len=kv_len,
        page_table=page_table,
        backend=backend,
        pool=pool,
    )


def _page_table(parts: list[Part], kv_len: NDArray[np.int64], pool: KVPool) -> NDArray[np.int64]:
    """A sequence may already hold pages for tokens that this step does not reach: they are left out."""
    num_pages = -(-kv_len // pool.page_size)
    table = np.full((len(kv_len), int(num_pages.max())), pool.padding_page, dtype=np.int64)
    for row, part, n in zip(table, parts, num_pages.tolist(), strict=True):
        row[:n] = part.seq.pages[:n]
    return table
