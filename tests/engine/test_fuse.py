"""Fused layers: which families get them, that they compute the same, and what happens when they would not."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import fuse, linear, native
from engine.fuse import FusedBody, FusedLayer, KeptLayer
from engine.messages import EngineConfig
from engine.model import load
from engine.native import NativeOps
from engine.ops import HeadNorms, TorchOps
from engine.quantize import round_weights

from .tiny_models import Driver, make, random_prompts, reference, runner_of

needs_compiler = pytest.mark.skipif(native.kernels(torch.float32) is None, reason="needs a C++ compiler")
CPU = torch.device("cpu")


def layers_of(runner) -> list:
    body = runner.model.body
    return body.layers if isinstance(body, FusedBody) else []


@pytest.mark.parametrize("family", ["llama", "llama-bias", "llama3-rope", "qwen2", "qwen3", "mistral-window", "phi3"])
def test_llama_shaped_families_are_fused(family, tmp_path):
    layers = layers_of(runner_of(make(family, tmp_path)))
    assert len(layers) == 3 and all(isinstance(layer, FusedLayer) and layer.mlp is None for layer in layers)


def test_experts_are_kept_inside_fused_layers(tmp_path):
    assert all(layer.mlp is not None for layer in layers_of(runner_of(make("qwen3-moe", tmp_path))))


def test_a_layer_that_computes_something_else_is_kept(tmp_path):
    """The middle layer of this family has no rotary embedding: only comparing finds out."""
    kinds = [type(layer) for layer in layers_of(runner_of(make("smollm3", tmp_path)))]
    assert kinds == [FusedLayer, KeptLayer, FusedLayer]


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2", "granite", "cohere", "gpt-oss", "olmo2"])
def test_families_that_look_alike_but_differ_are_not_fused(family, tmp_path):
    assert layers_of(runner_of(make(family, tmp_path))) == []


def test_nothing_is_lost_when_the_first_layer_differs(tmp_path):
    """Ops that are slightly wrong: the comparison notices, and the model is still whole."""

    class WrongOps(TorchOps):
        def silu_mul(self, gate_up):
            return super().silu_mul(gate_up) * 1.01

    folder = make("llama", tmp_path)
    loaded = load(EngineConfig(str(folder), dtype="float32"), CPU)
    before = [parameter.clone() for parameter in loaded.hf.parameters()]
    make_plain = linear.maker(CPU, torch.float32, None, None)
    with torch.inference_mode():
        assert fuse.fuse(loaded.hf.base_model, loaded.specs, 256, WrongOps(), make_plain, None) is None
        assert all(torch.equal(a, b) for a, b in zip(before, loaded.hf.parameters(), strict=True))
        assert fuse.fuse(loaded.hf.base_model, loaded.specs, 256, TorchOps(), make_plain, None) is not None


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9, 400])
@pytest.mark.parametrize("normed", [False, True])
def test_native_operations_equal_torch(dtype, tokens, normed):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    torch_ops, native_ops = TorchOps(), NativeOps(native.kernels(dtype))
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    x, weight = normal(tokens, 100), normal(100)
    assert torch.allclose(native_ops.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5), **tolerance)
    gate_up = normal(tokens, 2 * 77) * 5
    assert torch.allclose(native_ops.silu_mul(gate_up), torch_ops.silu_mul(gate_up), **tolerance)
    qkv, angles = normal(tokens, (6 + 2 * 2) * 20), torch.rand(tokens, 10, generator=generator) * 6
    norms = HeadNorms(normal(20), normal(20), 1e-6) if normed else None
    expected = torch_ops.rotate(qkv.clone(), 6, 2, angles.cos(), angles.sin(), norms)
    found = native_ops.rotate(qkv.clone(), 6, 2, angles.cos(), angles.sin(), norms)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, **tolerance)


@needs_compiler
def test_extreme_gates_do_not_overflow():
    gate_up = torch.tensor([[1e30, -1e30, 100.0, -100.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    out = NativeOps(native.kernels(torch.float32)).silu_mul(gate_up)
    assert torch.allclose(out, TorchOps().silu_mul(gate_up), atol=1e-6) and torch.isfinite(out).all()


@needs_compiler
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama-bias", "phi"])  # one that is fused and one that is not
def test_quantized_models_serve_the_rounded_weights(family, kind, tmp_path):
    """What is served equals transformers on weights that were rounded to the same grid."""
    folder = make(family, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        round_weights(model.base_model, kind)
        head = model.get_output_embeddings()
        tied = head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        if tied:
            head.weight = torch.nn.Parameter(head.weight.clone())
            model.config.tie_word_embeddings = False
        round_weights(torch.nn.ModuleList([head]), "int8")
    model.save_pretrained(tmp_path / "rounded")
    prompts = random_prompts([5, 20, 40])
    expected = reference(tmp_path / "rounded", prompts, 6)
    driver = Driver(runner := runner_of(folder, quantization=kind))
    assert [type(layer) for layer in layers_of(runner)] == ([FusedLayer] * 3 if family == "llama-bias" else [])
    assert driver.run([driver.sequence(prompt, max_tokens=6) for prompt in prompts]) == expected


def test_families_without_a_compiler_run_in_torch(tmp_path):
    """The same through torch's operations alone: what a machine without a compiler, or a GPU, runs."""
    folder = make("qwen3", tmp_path)
    prompts = random_prompts([5, 40])
    expected = reference(folder, prompts, 8)
    runner = runner_of(folder, attention_backend="sdpa")
    with torch.inference_mode():
        runner.model = load(EngineConfig(str(folder), dtype="float32"), CPU)
        runner.model.speed_up(None, None)
    assert type(runner.model.body._ops) is TorchOps
    driver = Driver(runner)
    assert driver.run([driver.sequence(prompt) for prompt in prompts]) == expected
