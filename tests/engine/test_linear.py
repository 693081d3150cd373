"""Every format of a linear layer against the plain product, for few and many rows and awkward sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine import linear, native, quantize
from engine.linear import ByRows, Linear, LinearModule, NativeLinear, PackedLinear

needs_compiler = pytest.mark.skipif(native.kernels(torch.float32) is None, reason="needs a C++ compiler")
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 40, 300]


def weight_of(outputs: int, inputs: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs * inputs)
    return (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)


def check(made: Linear, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tolerance: float) -> None:
    """`weight`: the values that `made` stands for."""
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        residual = torch.randn(rows, weight.shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        found = made(x)
        assert found.dtype == dtype and found.shape == expected.shape
        assert (found.double() - expected).abs().max() < tolerance, rows
        assert (made.add_to(residual, x).double() - residual.double() - expected).abs().max() < tolerance, rows


@needs_compiler
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 8), (31, 64), (100, 33), (3, 5), (50, 4000)])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_native_equals_the_plain_product(stored, outputs, inputs, biased):
    weight = weight_of(outputs, inputs, getattr(torch, stored)).float()
    bias = weight_of(outputs, 1)[:, 0] if biased else None
    made = NativeLinear(native.kernels(torch.float32), weight, bias)
    # 16 bits only if they lose nothing, and there are pairs
    assert made.weight.dtype == (torch.float32 if inputs % 2 else getattr(torch, stored))
    check(made, weight, bias, torch.float32, 2e-5)


@needs_compiler
@pytest.mark.parametrize("kind", quantize.KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (31, 64), (50, 4000), (7, 33)])
def test_native_integers_equal_the_widened_weights(kind, outputs, inputs):
    quantized = quantize.quantize(weight_of(outputs, inputs), kind)
    bias = weight_of(outputs, 1)[:, 0]
    made = NativeLinear(native.kernels(torch.float32), quantized, bias)
    check(made, quantized.widened(), bias, torch.float32, 2e-4)  # rows are rounded to 16 bits


@needs_compiler
@pytest.mark.parametrize("kind", quantize.KINDS)
def test_native_integers_with_rows_of_any_size(kind):
    """A row is rounded in groups of 128 inputs: huge ones do not cost the small ones of others their digits."""
    quantized = quantize.quantize(weight_of(20, 384), kind)
    made, weight = NativeLinear(native.kernels(torch.float32), quantized), quantized.widened().double()
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(0))
    x[0, :128] *= 1e6
    x[0, 128:] *= 1e-6
    x[1, 100:300] = 0.0
    x[2] = 0.0
    x[2, 7] = 1e-38
    found = made(x).double()
    for row in range(3):
        parts = [(x[row, k : k + 128].double(), weight[:, k : k + 128]) for k in range(0, 384, 128)]
        bound = sum(part.abs().max() * w.abs().sum(1) for part, w in parts) * 2**-15 + 1e-30
        assert ((found[row] - x[row].double() @ weight.T).abs() <= bound).all(), row
    small = torch.zeros(1, 384)
    small[0, 128:] = x[0, 128:]
    large = x[:1] - small
    assert torch.allclose(found[:1], made(large).double() + made(small).double(), rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize("kind", quantize.KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden_by_rounding(kind, value):
    made = NativeLinear(native.kernels(torch.float32), quantize.quantize(weight_of(20, 256), kind))
    x = torch.randn(2, 256)
    x[1, 200] = value
    found = made(x)
    assert found[0].isfinite().all() and found[1].isnan().all()


@needs_compiler
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "pairs", *quantize.KINDS])
def test_a_row_does_not_depend_on_the_others(stored):
    """To the last bit: whoever shares a step with a request, its answer stays the same."""
    dtype = torch.bfloat16 if stored == "pairs" else torch.float32
    weight = weight_of(100, 320, torch.float32 if stored == "float32" else torch.bfloat16).to(dtype)
    made = NativeLinear(
        native.kernels(dtype),
        quantize.quantize(weight, stored) if stored in quantize.KINDS else weight,
        pairs=stored == "pairs",
    )
    assert native.FORMATS[made.struct.format] == stored
    x = torch.randn(300, 320).to(dtype)
    whole = made(x)
    for first, last in [(0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (15, 21), (21, 28), (28, 60), (60, 300)]:
        assert torch.equal(made(x[first:last]), whole[first:last]), (first, last)


@needs_compiler
@pytest.mark.parametrize("kind", [None, *quantize.KINDS])
def test_native_with_bfloat16_activations(kind):
    weight = weight_of(70, 96, torch.bfloat16)
    bias = weight_of(70, 1, torch.bfloat16)[:, 0]
    stored = weight if kind is None else quantize.quantize(weight, kind)
    made = NativeLinear(native.kernels(torch.bfloat16), stored, bias)
    check(made, weight if kind is None else stored.widened(), bias, torch.bfloat16, 0.05)


@needs_compiler
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 8), (31, 64), (50, 4000), (70, 33)])
def test_native_pairs_of_bfloat16(outputs, inputs):
    """The layout for processors with an instruction for pairs; others compute the same in two."""
    weight = weight_of(outputs, inputs, torch.bfloat16)
    made = NativeLinear(native.kernels(torch.bfloat16), weight, pairs=True)
    assert native.FORMATS[made.struct.format] == ("pairs" if inputs % 2 == 0 else "float32")
    check(made, weight, None, torch.bfloat16, 0.05)
    check(NativeLinear(native.kernels(torch.float32), weight.float(), pairs=True), weight, None, torch.float32, 0.05)


def test_packed_equals_the_plain_product():
    weight, bias = weight_of(100, 33), weight_of(100, 1)[:, 0]
    check(PackedLinear(weight, bias), weight, bias, torch.float32, 2e-5)


def test_the_number_of_rows_chooses_the_format():
    one, two = Linear(torch.ones(1, 1)), Linear(torch.full((1, 1), 2.0))
    both = ByRows(one, two, most=3)
    assert both(torch.ones(3, 1))[0] == 1 and both(torch.ones(4, 1))[0] == 2
    assert both.add_to(torch.ones(3, 1), torch.ones(3, 1))[0] == 2
    assert both.add_to(torch.ones(4, 1), torch.ones(4, 1))[0] == 3


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_made_layers_take_the_place_of_torch_ones(dtype, compiled):
    """Whatever this machine has: the result is a module that computes the same, with any leading dimensions."""
    kernels = native.kernels(dtype) if compiled else None
    model = nn.Sequential(nn.Linear(20, 30), nn.SiLU(), nn.Sequential(nn.Linear(30, 10, bias=False))).to(dtype)
    x = torch.randn(2, 3, 20).to(dtype)
    with torch.inference_mode():
        expected = model(x)
        linear.replace_all(model, linear.maker(torch.device("cpu"), dtype, kernels, None))
        assert isinstance(model[0], LinearModule) and isinstance(model[2][0], LinearModule)
        assert torch.allclose(model(x), expected, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("kind", quantize.KINDS)
def test_quantizing_is_close_and_doing_it_twice_changes_nothing(kind):
    weight = weight_of(64, 128)
    weight[3] = 0.0
    once = quantize.quantize(weight, kind)
    twice = quantize.quantize(once.widened(), kind)
    assert torch.equal(once.values, twice.values) and torch.allclose(once.scales, twice.scales, rtol=1e-6, atol=0)
    error = (once.widened() - weight).abs().max() / weight.abs().max()
    assert error < (0.005 if kind == "int8" else 0.08)
    assert once.values.dtype == torch.int8 and not once.widened()[3].any()
