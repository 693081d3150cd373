"""Paged attention for CPUs: single queries by a compiled kernel that reads pages where they lie, the rest by torch.

Prompts are attended as in sdpa.py, whose matmuls are hard to beat; there the copying of pages is a small part.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import native
from engine.attention.base import LayerSpec
from engine.attention.sdpa import Plan, SdpaBackend
from engine.batch import Batch
from engine.kv import KVPool


@dataclass(slots=True)
class CpuPlan:
    prefills: Plan  # the torch backend's plan, for the parts of more than one token
    num_decodes: int
    num_parts: int
    step: native.Step
    kept: list[Tensor] = field(default_factory=list)  # what `step` points to


class CpuBackend(SdpaBackend):
    name = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[int, native.Layer] = {}
        self._kernels: native.Kernels | None = None

    @classmethod
    def refusal(cls, specs: Sequence[LayerSpec], device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return "runs on CPUs only"
        if native.kernels(dtype) is None:
            return f"needs a C++ compiler and float32 or bfloat16, not {dtype}"
        return None

    def prepare(self, batch: Batch, pool: KVPool) -> CpuPlan:
        prefills = Plan(batch, pool, self._group_tokens)
        kv_len, table = torch.from_numpy(batch.kv_len), torch.from_numpy(batch.page_table)
        step = native.Step(
            tokens=len(batch.slots),
            slots=batch.slots.data_ptr(),
            decodes=prefills.num_decodes,
            kv_len=kv_len.data_ptr(),
            page_table=table.data_ptr(),
            table_stride=table.shape[1],
        )
        return CpuPlan(prefills, prefills.num_decodes, len(kv_len), step, [batch.slots, kv_len, table])

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
            self._kernels = native.kernels(pool.keys[0].dtype)
        sinks = sinks.float().contiguous() if sinks is not None else None
        self._kernels.attend(
            byref(self._layer(layer, spec, sinks, pool)), byref(plan.step), query.data_ptr(), query.stride(0),
            key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), out.data_ptr(),
        )  # fmt: skip
        if plan.num_decodes < plan.num_parts:
            chunks = self._attend_chunks(layer, spec, query, key, value, sinks, pool, plan.prefills)
            torch.cat(list(chunks), out=out[plan.num_decodes :])
        return out

    def _layer(self, layer: int, spec: LayerSpec, sinks: Tensor | None, pool: KVPool) -> native.Layer:
        made = self._layers.get(layer)
        if made is None:
            made = self._layers[layer] = native.Layer(
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
        made.sinks = sinks.data_ptr() if sinks is not None else None
        return made


def _rows(x: Tensor) -> Tensor:
    """[T, heads, D] whose rows are contiguous, however far apart; a copy if need be."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
