"""Paged attention by torch's own kernel for sequences of various lengths, where flash-attn is not installed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.attention.base import LayerSpec
from engine.attention.tables import TableBackend, TablePlan


class VarlenBackend(TableBackend):
    name = "varlen"

    @classmethod
    def refusal(cls, specs: Sequence[LayerSpec], device: torch.device, dtype: torch.dtype) -> str | None:
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            return f"needs a torch that reads pages by table (2.12 or later), not {torch.__version__}"
        if any(spec.softcap is not None for spec in specs):
            return "knows no soft cap"
        return super().refusal(specs, device, dtype)

    def attend(self, spec: LayerSpec, query: Tensor, keys: Tensor, values: Tensor, plan: TablePlan) -> Tensor:
        return varlen_attn(
            query, keys, values, plan.cu_q, plan.cu_k, plan.max_q, plan.max_k,
            scale=spec.scale,
            window_size=(-1 if spec.window is None else spec.window - 1, 0),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=plan.kv_len,
            block_table=plan.page_table,
        )  # fmt: skip
