"""After load: swaps the layers of Llama-shaped families for fused ones, if they compute the same.

One GEMM for query, key and value, one for gate and up, residual additions inside the GEMMs, few other operations.
What is fusable is found by structure, not by name: a layer with the modules of Llama's (Mistral, Qwen2 and 3, SmolLM,
Yi, ...); another MLP, a mixture of experts say, is kept as it is. Each layer is then compared on a few tokens with the
Hugging Face layer it replaces, and one that differs is left alone. Weights are given up layer by layer.

    T tokens, H hidden size, D head size
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import native, quantize
from engine.attention.base import LayerSpec, PagedBatch
from engine.attention.cpu import CpuBackend
from engine.batch import Batch
from engine.linear import ByRows, Linear, Make
from engine.native import NativeOps
from engine.ops import HeadNorms, TorchOps

# Largest difference to the Hugging Face layer, as a share of the largest value that the layer adds.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_TOLERANCE_QUANTIZED = 5e-3  # at least: what such layers multiply is rounded to 16 bits
_NUM_CHECKED = 8  # tokens


@dataclass(slots=True)
class Step:
    """What all layers of a forward share."""

    batch: PagedBatch
    positions: Tensor  # int64 [T]
    cos: Tensor  # float32 [T, D / 2]
    sin: Tensor


class Dense:
    """A batch of one whole prompt without pages, for the comparison."""

    def attend(
        self, layer: int, spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True).transpose(
            0, 1
        )


class FusedLayer:
    """Raises AttributeError or _NotFusable if the layer is not shaped like Llama's."""

    def __init__(self, layer: nn.Module, index: int, spec: LayerSpec, ops: TorchOps, make: Make) -> None:
        attention = layer.self_attn
        projections = _projections(attention, "qkv_proj", ["q_proj", "k_proj", "v_proj"])
        _require(type(attention.o_proj) is nn.Linear, "projections")
        _require(spec.head_dim == spec.value_dim and not spec.sinks, "attention")
        self.index, self.spec, self.ops = index, spec, ops
        self.input_norm, self.eps = _rms_norm(layer.input_layernorm)
        self.post_norm, _ = _rms_norm(layer.post_attention_layernorm)
        self.head_norms: HeadNorms | None = None
        if hasattr(attention, "q_norm"):
            query, eps = _rms_norm(attention.q_norm)
            self.head_norms = HeadNorms(query, _rms_norm(attention.k_norm)[0], eps)
            _require(query.shape == (spec.head_dim,), "head norms")
        self.qkv = _stacked(projections, make)
        self.out = make(attention.o_proj.weight, attention.o_proj.bias)
        self.mlp: nn.Module | None = layer.mlp
        if _is_llama_mlp(layer.mlp):
            self.gate_up = _stacked(_projections(layer.mlp, "gate_up_proj", ["gate_proj", "up_proj"]), make)
            self.down = make(layer.mlp.down_proj.weight, layer.mlp.down_proj.bias)
            self.mlp = None

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, H] -> [T, H]"""
        ops, spec = self.ops, self.spec
        qkv = self.qkv(ops.rms_norm(hidden, self.input_norm, self.eps))
        query, key, value = ops.rotate(qkv, spec.num_heads, spec.num_kv_heads, step.cos, step.sin, self.head_norms)
        attended = step.batch.attend(self.index, spec, query, key, value, None)
        hidden = self.out.add_to(hidden, attended.reshape(hidden.shape[0], -1))
        normed = ops.rms_norm(hidden, self.post_norm, self.eps)
        if self.mlp is None:
            return self.down.add_to(hidden, ops.silu_mul(self.gate_up(normed)))
        added = self.mlp(normed[None])
        return hidden + (added[0] if isinstance(added, tuple) else added)[0]


class KeptLayer:
    """A Hugging Face layer among fused ones."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        cos, sin = (torch.cat([each, each], dim=-1)[None].to(hidden.dtype) for each in (step.cos, step.sin))
        out = self.layer(
            hidden[None],
            position_embeddings=(cos, sin),
            position_ids=step.positions[None],
            attention_mask=None,
            use_cache=False,
            paged_batch=step.batch,
        )
        return (out[0] if isinstance(out, tuple) else out)[0]


class NativeStack:
    """All layers in one call of the CPU's kernels; the layers themselves are what it is compared with in tests."""

    def __init__(self, layers: list[FusedLayer], kernels: native.Kernels) -> None:
        self._layers, self._kernels = layers, kernels
        self._structs: ctypes.Array[native.DecoderLayer] | None = None  # made with the pool of the first step
        linears = [each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        # Where another format serves many rows, the stack is for few.
        self.most_rows = min((each.most for each in linears if isinstance(each, ByRows)), default=1 << 62)

    @staticmethod
    def of(layers: list[FusedLayer | KeptLayer], ops: TorchOps) -> NativeStack | None:
        """None if a layer has a part that is not the kernels' own."""
        if not isinstance(ops, NativeOps) or not all(isinstance(each, FusedLayer) and not each.mlp for each in layers):
            return None
        return NativeStack(layers, ops.kernels)

    def takes(self, batch: PagedBatch, num_tokens: int) -> bool:
        return isinstance(batch, Batch) and isinstance(batch.backend, CpuBackend) and num_tokens <= self.most_rows

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """hidden [T, H], which is overwritten"""
        batch = step.batch
        assert isinstance(batch, Batch)
        if self._structs is None:
            structs = [self._struct(layer, batch) for layer in self._layers]
            self._structs = (native.DecoderLayer * len(structs))(*structs)
        self._kernels.decode(
            self._structs, len(self._structs), batch.plan.step, step.cos.data_ptr(), step.sin.data_ptr(),
            hidden.data_ptr(),
        )  # fmt: skip
        return hidden

    @staticmethod
    def _struct(layer: FusedLayer, batch: Batch) -> native.DecoderLayer:
        norms = layer.head_norms
        linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
        qkv, out, gate_up, down = (each.few if isinstance(each, ByRows) else each for each in linears)
        return native.DecoderLayer(
            input_norm=layer.input_norm.data_ptr(),
            post_norm=layer.post_norm.data_ptr(),
            q_norm=norms.query.data_ptr() if norms else None,
            k_norm=norms.key.data_ptr() if norms else None,
            qkv=qkv.struct,
            out=out.struct,
            gate_up=gate_up.struct,
            down=down.struct,
            attention=batch.backend.layer(layer.index, layer.spec, batch.pool),
            eps=layer.eps,
            head_eps=norms.eps if norms else 0.0,
        )


class FusedBody:
    """token ids, positions [T] -> hidden states [T, H] after the last norm."""

    stack: NativeStack | None = None

    def __init__(self, body: nn.Module, layers: list[FusedLayer | KeptLayer], ops: TorchOps) -> None:
        self._embedding: Tensor = body.embed_tokens.weight
        self.layers, self._ops = layers, ops
        self._norm, self._eps = _rms_norm(body.norm)
        self._frequencies: Tensor = body.rotary_emb.inv_freq  # float32 [D / 2]
        self._scaling: float = body.rotary_emb.attention_scaling

    def __call__(self, token_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        hidden = F.embedding(token_ids, self._embedding)
        step = self.step(positions, batch)
        if self.stack is not None and self.stack.takes(batch, len(token_ids)):
            hidden = self.stack(hidden, step)
        else:
            for layer in self.layers:
                hidden = layer(hidden, step)
        return self._ops.rms_norm(hidden, self._norm, self._eps)

    def step(self, positions: Tensor, batch: PagedBatch) -> Step:
        angles = positions[:, None] * self._frequencies
        return Step(batch, positions, angles.cos() * self._scaling, angles.sin() * self._scaling)


def fuse(
    body: nn.Module, specs: list[LayerSpec], max_len: int, ops: TorchOps, make: Make, quantization: str | None
) -> FusedBody | None:
    """None if nothing can be fused. Else the fused layers of `body` are empty afterwards."""
    try:
        _require(type(body.embed_tokens) is nn.Embedding, "embedding")
        _require(getattr(body.rotary_emb, "rope_type", "") != "dynamic", "rotary embedding")
        _require(2 * body.rotary_emb.inv_freq.numel() == specs[0].head_dim, "rotary embedding")
        layers: list[FusedLayer | KeptLayer] = []
        fused = FusedBody(body, layers, ops)
    except (AttributeError, _NotFusable):
        return None
    device = body.embed_tokens.weight.device
    token_ids = torch.arange(_NUM_CHECKED, device=device) % body.embed_tokens.num_embeddings
    # From the first position to the last one: some families scale their queries far out only.
    step = fused.step(torch.linspace(0, max_len - 1, _NUM_CHECKED, device=device).long(), Dense())
    hidden = F.embedding(token_ids, body.embed_tokens.weight)
    for index, (layer, spec) in enumerate(zip(body.layers, specs, strict=True)):
        if quantization is not None:
            quantize.round_weights(layer, quantization)
        try:
            candidate = FusedLayer(layer, index, spec, ops, make)
        except (AttributeError, _NotFusable):
            candidate = None
        if candidate is None and index == 0:
            return None
        kept = KeptLayer(layer)
        expected = kept(hidden, step)
        if candidate is not None and _equal(candidate(hidden, step), expected, hidden, quantization is not None):
            layers.append(candidate)
            body.layers[index] = nn.Identity()
        elif index == 0:
            return None
        else:
            layers.append(kept)
        hidden = expected
    fused.stack = NativeStack.of(layers, ops)
    return fused


def _equal(found: Tensor, expected: Tensor, before: Tensor, quantized: bool) -> bool:
    """`before`: the layer's input. What it adds must agree, but for the rounding of a large sum in a short dtype."""
    tolerance = max(_TOLERANCE[found.dtype], _TOLERANCE_QUANTIZED if quantized else 0.0)
    added = (expected - before).abs().max()
    rounding = 4 * torch.finfo(found.dtype).eps * expected.abs()
    return bool(((found - expected).abs() <= tolerance * added + rounding).all())


class _NotFusable(Exception):
    pass


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise _NotFusable(what)


def _rms_norm(norm: nn.Module) -> tuple[Tensor, float]:
    """-> (weight, eps). Whether it really is x / rms(x) * weight is found by the comparison."""
    return norm.weight, float(norm.variance_epsilon)


def _projections(module: nn.Module, joined: str, names: list[str]) -> list[nn.Module]:
    """The linear layers that read a module's input: one for all (Phi-3), or one each."""
    found = [getattr(module, joined)] if hasattr(module, joined) else [getattr(module, name) for name in names]
    _require(all(type(each) is nn.Linear for each in found), "projections")
    return found


def _is_llama_mlp(mlp: nn.Module) -> bool:
    """down(silu(gate(x)) * up(x)), as far as its modules tell."""
    linears = [name for name, child in mlp.named_children() if type(child) is nn.Linear]
    activation = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    return sorted(linears) in (["down_proj", "gate_proj", "up_proj"], ["down_proj", "gate_up_proj"]) and isinstance(
        activation, nn.SiLU | type(_silu())
    )


def _silu() -> nn.Module:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]


def _stacked(linears: list[nn.Module], make: Make) -> Linear:
    """Several projections of the same input as one."""
    if len(linears) == 1:
        return make(linears[0].weight, linears[0].bias)
    biases = [each.bias for each in linears]
    _require(all(bias is None for bias in biases) or all(bias is not None for bias in biases), "biases")
    bias = None if biases[0] is None else torch.cat(biases)
    return make(torch.cat([each.weight for each in linears]), bias)
