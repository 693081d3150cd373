"""The small operations between the GEMMs of a Llama-shaped layer, in plain torch.

`engine.native` has the same three for CPUs, compiled; these are its reference and its fallback, and what a GPU runs.

    T tokens, H hidden size, Hq query heads, Hkv key/value heads, D head size, I intermediate size
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over D of queries and keys before they are rotated (Qwen3)."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float


class TorchOps:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H], weight [H]"""
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(
        self, qkv: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (Hq + 2 Hkv) * D], cos and sin float32 [T, D / 2] -> query [T, Hq, D] and key [T, Hkv, D],
        normed and rotated, value [T, Hkv, D]. May overwrite qkv."""
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            query = F.rms_norm(query, norms.query.shape, norms.query, norms.eps)
            key = F.rms_norm(key, norms.key.shape, norms.key, norms.eps)
            return _rotate(query, cos, sin), _rotate(key, cos, sin), value
        both = _rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        return both[:, :num_heads], both[:, num_heads:], value

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(gate) * up, [T, I]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]: the halves of a head are the two coordinates"""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
