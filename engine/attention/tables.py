"""What backends share whose kernels follow page tables on the device themselves: flash.py and varlen.py.

keys, values [N + 1, page_size, Hkv, D] (tokens before heads: a slot is one row)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend, LayerSpec
from engine.batch import Batch
from engine.kv import KVPool


@dataclass(slots=True)
class TablePlan:
    slots: Tensor  # int64 [T]
    cu_q: Tensor  # int32 [B + 1]: rows of part b are [cu_q[b], cu_q[b + 1])
    cu_k: Tensor  # int32 [B + 1]: cumulated kv_len
    kv_len: Tensor  # int32 [B]
    page_table: Tensor  # int32 [B, P]
    max_q: int
    max_k: int


class TableBackend(AttentionBackend):
    default_page_size = 256  # flash-attn 2 refuses pages of any other multiple
    page_multiple = 256
    tokens_first = True

    @classmethod
    def refusal(cls, specs: Sequence[LayerSpec], device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return "runs on CUDA devices only"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"computes in bfloat16 or float16, not {dtype}"
        for spec in specs:
            if spec.sinks:
                return "knows no attention sinks"
            if spec.head_dim != spec.value_dim or spec.head_dim % 8 or spec.head_dim > 256:
                return f"needs heads of a multiple of 8, at most 256, not {spec.head_dim} and {spec.value_dim}"
        return None

    def prepare(self, batch: Batch, pool: KVPool) -> TablePlan:
        def cumulated(counts: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.concatenate([[0], np.cumsum(counts)])

        def on_device(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(pool.device, non_blocking=True)

        return TablePlan(
            slots=batch.slots,
            cu_q=on_device(batch.q_start),
            cu_k=on_device(cumulated(batch.kv_len)),
            kv_len=on_device(batch.kv_len),
            page_table=on_device(batch.page_table),
            max_q=int(np.diff(batch.q_start).max()),
            max_k=int(batch.kv_len.max()),
        )

    def run(
        self,
        layer: int,
        spec: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        pool: KVPool,
        plan: TablePlan,
    ) -> Tensor:
        keys, values = pool.keys[layer], pool.values[layer]
        keys.flatten(0, 1).index_copy_(0, plan.slots, key)
        values.flatten(0, 1).index_copy_(0, plan.slots, value)
        return self.attend(spec, query.contiguous(), keys, values, plan)

    @abstractmethod
    def attend(self, spec: LayerSpec, query: Tensor, keys: Tensor, values: Tensor, plan: TablePlan) -> Tensor:
        """query [T, Hq, D], everything else in the pages -> [T, Hq, D]"""
