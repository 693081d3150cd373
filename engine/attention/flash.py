"""Paged attention by the flash-attn package (version 2): its decode kernel where all parts are single tokens, else
its kernel for sequences of various lengths. Both read pages by table."""

from __future__ import annotations

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from engine.attention.base import LayerSpec
from engine.attention.tables import TableBackend, TablePlan


class FlashBackend(TableBackend):
    name = "flash"

    def attend(self, spec: LayerSpec, query: Tensor, keys: Tensor, values: Tensor, plan: TablePlan) -> Tensor:
        options = dict(
            softmax_scale=spec.scale,
            causal=True,
            window_size=(-1, -1) if spec.window is None else (spec.window - 1, 0),
            softcap=spec.softcap or 0.0,
            block_table=plan.page_table,
        )
        if plan.max_q == 1:
            out = flash_attn_with_kvcache(query.unsqueeze(1), keys, values, cache_seqlens=plan.kv_len, **options)
            return out.squeeze(1)
        return flash_attn_varlen_func(query, keys, values, plan.cu_q, plan.cu_k, plan.max_q, plan.max_k, **options)
