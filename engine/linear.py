"""y = x W^T + b in the memory format that the device multiplies fastest. One object a weight.

x [T, in], W [out, in], b [out], residual [T, out] -> [T, out]

Linear          weights as they are: what a GPU wants, and the reference of every other format
PackedLinear    oneDNN's blocked order (CPU)
NativeLinear    panels of engine/native (CPU), stored as float32, bfloat16 (plain or in pairs), int8 or int4
ByRows          two of them: one for few rows, one for many
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import native
from engine.native import Kernels
from engine.quantize import Quantized, quantize

Make = Callable[[Tensor, Tensor | None], "Linear"]


class Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in one pass where the format allows."""
        return residual + self(x)


class PackedLinear(Linear):
    """The order is laid out once instead of at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


class NativeLinear(Linear):
    """All arithmetic is in float32, so weights of a bfloat16 checkpoint can be kept as such without any loss.

    `pairs`: bfloat16 weights are multiplied with bfloat16 rows, for processors that do so with pairs of them at once.
    """

    def __init__(
        self, kernels: Kernels, weight: Tensor | Quantized, bias: Tensor | None = None, *, pairs: bool = False
    ) -> None:
        scales: Tensor | None = None
        if isinstance(weight, Quantized):
            kind, scales = weight.kind, weight.scales
            packed = _panels(F.pad(weight.values, (0, weight.shape[1] % 2)), kernels.columns)
            if kind == "int8":
                packed = packed.unflatten(1, (-1, 2)).transpose(2, 3)
            else:
                packed = _words(packed)
                scales = _panels(weight.scales, kernels.columns).contiguous()
        else:
            short = weight.to(torch.bfloat16)
            if weight.shape[1] % 2 == 0 and bool((short == weight).all()):
                kind = "pairs" if pairs else "bfloat16"
                packed = _panels(short, kernels.columns).unflatten(1, (-1, 2)).transpose(2, 3)
            else:
                kind = "float32"
                packed = _panels(weight.float(), kernels.columns)
        super().__init__(packed.contiguous(), None if bias is None else bias.contiguous())
        self._scales = scales
        self._gemm = kernels.gemm
        self.struct = native.Linear(
            weights=self.weight.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=weight.shape[1],
            outputs=weight.shape[0],
            format=native.FORMATS.index(kind),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._run(x, residual.data_ptr())

    def _run(self, x: Tensor, residual: int | None) -> Tensor:
        """`residual`: where it lies, if one is to be added."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self.struct.outputs)
        self._gemm(self.struct, x.data_ptr(), x.shape[0], residual, out.data_ptr())
        return out


def _panels(weight: Tensor, columns: int) -> Tensor:
    """[out, in] -> [ceil(out / columns), in, columns], zeros where there is no output"""
    weight = F.pad(weight, (0, 0, 0, -weight.shape[0] % columns))
    return weight.view(-1, columns, weight.shape[1]).transpose(1, 2)


def _words(nibbles: Tensor) -> Tensor:
    """0..15 [panels, in, columns] -> int32 [panels, in / 8, columns]: inputs 0 2 4 6 in the low half, 1 3 5 7 high."""
    eights = nibbles.int().unflatten(1, (-1, 4, 2))
    words = eights.new_zeros(len(nibbles), eights.shape[1], nibbles.shape[2])
    for pair in range(4):
        for half in range(2):
            words |= eights[:, :, pair, half] << 4 * pair + 16 * half
    return words


class ByRows(Linear):
    """`few` up to `most` rows of x, `many` beyond."""

    def __init__(self, few: Linear, many: Linear, most: int) -> None:
        self.few, self.many, self.most = few, many, most

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x) if x.shape[0] <= self.most else self.many(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.few.add_to(residual, x) if x.shape[0] <= self.most else self.many.add_to(residual, x)


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def maker(device: torch.device, dtype: torch.dtype, kernels: Kernels | None, quantization: str | None) -> Make:
    """How linear layers of this device and dtype are made. Quantization needs kernels."""
    if device.type != "cpu":
        return Linear
    hardware = dtype == torch.bfloat16 and has_fast_bf16()
    packs = torch.backends.mkldnn.is_available() and (hardware or dtype == torch.float32)
    if kernels is None:
        return PackedLinear if packs else Linear

    def native(weight: Tensor, bias: Tensor | None) -> Linear:
        stored = weight if quantization is None else quantize(weight, quantization)
        return NativeLinear(kernels, stored, bias, pairs=hardware)

    # In float32 oneDNN is slower whatever the number of rows; for bfloat16 it may have hardware that we do not use.
    if not hardware:
        return native
    most_rows: list[int | None] = []  # measured with the first weight

    def make(weight: Tensor, bias: Tensor | None = None) -> Linear:
        if not most_rows:
            sample = weight[: max(1, (1 << 22) // weight.shape[1])]
            most_rows.append(_crossover(native(sample, None), PackedLinear(sample), sample))
        few = native(weight, bias)
        return few if most_rows[0] is None else ByRows(few, PackedLinear(weight, bias), most_rows[0])

    return make


def _crossover(few: Linear, many: Linear, weight: Tensor) -> int | None:
    """Rows up to which `few` is about as fast as `many` or faster; None if it is with any number of them."""
    for rows in (1, 4, 8, 16, 32, 128):
        x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
        seconds: dict[Linear, list[float]] = {few: [], many: []}
        for _ in range(7):  # in turns, since other processes come and go
            for linear, times in seconds.items():
                begin = time.perf_counter()
                linear(x)
                times.append(time.perf_counter() - begin)
        if min(seconds[few]) > 1.1 * min(seconds[many]):
            return rows - 1
    return None


class LinearModule(nn.Module):
    """A linear layer in the place of an nn.Linear: any number of leading dimensions."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def replace_all(module: nn.Module, make: Make) -> None:
    """Every nn.Linear inside `module`, as it is, by one made by `make`; weights are given up one by one."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, LinearModule(make(child.weight, child.bias)))
        else:
            replace_all(child, make)
