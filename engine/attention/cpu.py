"""Paged attention for CPUs by a compiled kernel, engine/native/attention.cpp, that reads pages where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import native
from engine.attention.base import AttentionBackend, LayerSpec
from engine.batch import Batch
from engine.kv import KVPool


@dataclass(slots=True)
class CpuPlan:
    step: native.Step
    kept: tuple[Tensor, ...]  # what `step` points to


class CpuBackend(AttentionBackend):
    name = "cpu"

    def __init__(self) -> None:
        self._layers: dict[int, native.Attention] = {}
        self._kernels: native.Kernels | None = None

    @classmethod
    def refusal(cls, specs: Sequence[LayerSpec], device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return "runs on CPUs only"
        if native.kernels(dtype) is None:
            return f"needs a C++ compiler and float32 or bfloat16, not {dtype}"
        return None

    def prepare(self, batch: Batch, pool: KVPool) -> CpuPlan:
        q_start, kv_len, table = (torch.from_numpy(x) for x in (batch.q_start, batch.kv_len, batch.page_table))
        step = native.Step(
            tokens=len(batch.slots),
            parts=len(kv_len),
            slots=batch.slots.data_ptr(),
            q_start=q_start.data_ptr(),
            kv_len=kv_len.data_ptr(),
            page_table=table.data_ptr(),
            table_stride=table.shape[1],
        )
        return CpuPlan(step, (batch.slots, q_start, kv_len, table))

    def run(
        self,
        layer: int,
        spec: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        pool: KVPool,
        plan: CpuPlan,
    ) -> Tensor:
        query, key, value = _rows(query), _rows(key), _rows(value)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        if self._kernels is None:
            self._kernels = native.kernels(query.dtype)
        attention = self.layer(layer, spec, pool)
        if sinks is not None:
            sinks = sinks.float().contiguous()
            attention.sinks = sinks.data_ptr()
        self._kernels.attend(
            attention, plan.step, query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0),
            value.data_ptr(), value.stride(0), out.data_ptr(),
        )  # fmt: skip
        return out

    def layer(self, layer: int, spec: LayerSpec, pool: KVPool) -> native.Attention:
        """The struct that describes a layer to the kernels, but for its sinks."""
        if layer not in self._layers:
            self._layers[layer] = native.Attention(
                keys=pool.keys[layer].data_ptr(),
                values=pool.values[layer].data_ptr(),
                q_heads=spec.num_heads,
                kv_heads=spec.num_kv_heads,
                dim=spec.head_dim,
                value_dim=spec.value_dim,
                page_size=pool.page_size,
                window=spec.window or 0,
                scale=spec.scale,
                softcap=spec.softcap or 0.0,
            )
        return self._layers[layer]


def _rows(x: Tensor) -> Tensor:
    """[T, heads, D] whose rows are contiguous, however far apart; a copy if need be."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
