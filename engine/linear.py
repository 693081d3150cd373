"""y = x W^T + b in the memory format that the device multiplies fastest. One object a weight; the fused layers use it.

x [T, in], W [out, in], b [out] -> [T, out]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """Weights as they are: what a GPU wants, and the reference of every other format."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, out] + self(x), in one pass where the format allows."""
        return residual + self(x)


class PackedLinear(Linear):
    """Weights in oneDNN's blocked order, laid out once instead of at every call (CPU)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


def make(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """In the best format for the device and dtype of the weight [out, in]."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and weight.dtype != torch.float16:
        return PackedLinear(weight, bias)
    return Linear(weight, bias)
