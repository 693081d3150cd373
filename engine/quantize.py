"""Weights as small integers with scales; activations stay as they are (QUANTIZATION=int8 or int4, on CPUs).

    int8    one scale an output
    int4    one scale an output and 32 inputs

Quantizing what has been quantized and widened again changes nothing: the largest value of a group keeps its integer.
So a model is first rounded in place, and whatever replaces its layers can then be compared with it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

KINDS = ("int8", "int4")
GROUP = 32  # inputs that share a scale in int4


@dataclass(frozen=True, slots=True)
class Quantized:
    kind: str
    values: Tensor  # int8 [out, in]; int4: 0..15, which stands for -8..7
    scales: Tensor  # float32 [out]; int4: [out, in / GROUP]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def widened(self) -> Tensor:
        """float32 [out, in]"""
        if self.kind == "int8":
            return self.values * self.scales[:, None]
        grouped = (self.values - 8).unflatten(1, (-1, GROUP)) * self.scales[:, :, None]
        return grouped.flatten(1)


def quantize(weight: Tensor, kind: str) -> Quantized:
    """weight [out, in]. int4 falls back to int8 where the inputs do not divide into groups."""
    weight = weight.float()
    if kind == "int8" or weight.shape[1] % GROUP:
        scales = _scales(weight, 127)
        return Quantized("int8", (weight / scales).round_().to(torch.int8), scales[:, 0].contiguous())
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = _scales(grouped, 7)
    values = (grouped / scales).round_().add_(8).to(torch.int8)
    return Quantized("int4", values.flatten(1), scales[:, :, 0].contiguous())


def _scales(weight: Tensor, largest: int) -> Tensor:
    """Along the last dimension, which is kept; never 0."""
    return weight.abs().amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * largest) / largest


def round_weights(module: nn.Module, kind: str) -> None:
    """Every nn.Linear inside `module` gets, in place, the values that its quantized form stands for."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.weight.copy_(quantize(child.weight, kind).widened())


def refusal(hf: nn.Module) -> str | None:
    """Why a model cannot be quantized: most of its weights are no linear layers (experts, say)."""
    linear = sum(child.weight.numel() for child in hf.modules() if type(child) is nn.Linear)
    embeddings = sum(child.weight.numel() for child in hf.modules() if isinstance(child, nn.Embedding))
    total = sum(parameter.numel() for parameter in hf.parameters())
    return None if linear + embeddings >= 0.9 * total else "most of its weights are not in plain linear layers"
