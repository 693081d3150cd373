"""Old checkpoints: random weights under their old names give, through the engine, what their formats define.

The reference below is written from the formats (names, layouts, order of the halves), in plain torch and without
pages; it shares nothing with the maps that are tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, normalize, silu

from engine import batch
from engine.messages import EngineConfig
from engine.model import ModelLoadError, load
from engine.scheduler import Part, Plan

from .tiny_models import Driver, random_prompts, runner_of

VOCAB, HIDDEN, INNER, LAYERS, HEADS, GROUPS, DIM, EPS = 211, 48, 40, 2, 6, 2, 8, 1e-5
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """An old format. Names have {} for the layer; `qkv` and `mlp` get the weights, the layer and states [T, H]."""

    config: dict
    shapes: dict[str, tuple[int, ...]]
    embed: str
    norms: tuple[str, str, str]  # before the attention, before the MLP, at the end
    out: str  # the attention's output projection
    head: str
    qkv: Callable[[Weights, int, Tensor], tuple[Tensor, Tensor, Tensor]]  # -> [T, heads, DIM] each
    mlp: Callable[[Weights, int, Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor], Tensor]  # ([T, heads, DIM], positions [T])
    head_weight: Callable[[Tensor], Tensor] = lambda weight: weight


def rotate_halves(x: Tensor, positions: Tensor) -> Tensor:
    """Dimension i turns with dimension i + DIM / 2."""
    angles = positions[:, None, None] / 10000 ** (torch.arange(0, DIM, 2) / DIM)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def rotate_pairs(base: float, stretch: float = 1) -> Callable[[Tensor, Tensor], Tensor]:
    """The first half of the dimensions only, and neighbours turn together."""

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        width = DIM // 2
        angles = positions[:, None, None] / stretch / base ** (torch.arange(0, width, 2) / width)
        turned = x[..., :width].clone()
        turned[..., 0::2] = x[..., 0:width:2] * angles.cos() - x[..., 1:width:2] * angles.sin()
        turned[..., 1::2] = x[..., 1:width:2] * angles.cos() + x[..., 0:width:2] * angles.sin()
        return torch.cat([turned, x[..., width:]], dim=-1)

    return rotate


def stacked(name: str, groups: int, bias: bool = True) -> Callable:
    """One projection: all queries, then all keys, then all values."""

    def qkv(w: Weights, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fused = linear(x, w[f"{name.format(layer)}.weight"], w[f"{name.format(layer)}.bias"] if bias else None)
        q, k, v = fused[:, : HEADS * DIM], fused[:, HEADS * DIM : -groups * DIM], fused[:, -groups * DIM :]
        return tuple(part.reshape(len(x), -1, DIM) for part in (q, k, v))

    return qkv


def apart(w: Weights, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    names = [f"model.layers.{layer}.self_attn.{part}_proj" for part in "qkv"]
    return tuple(linear(x, w[f"{n}.weight"], w[f"{n}.bias"]).reshape(len(x), -1, DIM) for n in names)


def grouped(w: Weights, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """InternLM2: for each key's group its queries, the key and the value."""
    fused = linear(x, w[f"model.layers.{layer}.attention.wqkv.weight"])
    fused = fused.reshape(len(x), GROUPS, HEADS // GROUPS + 2, DIM)
    return fused[:, :, :-2].reshape(len(x), HEADS, DIM), fused[:, :, -2], fused[:, :, -1]


def gated(prefix: str, gate: str, up: str, down: str) -> Callable[[Weights, int, Tensor], Tensor]:
    def mlp(w: Weights, layer: int, x: Tensor) -> Tensor:
        gate_w, up_w, down_w = (w[f"{prefix.format(layer)}.{name}.weight"] for name in (gate, up, down))
        return linear(silu(linear(x, gate_w)) * linear(x, up_w), down_w)

    return mlp


def gate_above_up(w: Weights, layer: int, x: Tensor) -> Tensor:
    prefix = f"transformer.encoder.layers.{layer}.mlp"
    both = linear(x, w[f"{prefix}.dense_h_to_4h.weight"])
    return linear(silu(both[:, :INNER]) * both[:, INNER:], w[f"{prefix}.dense_4h_to_h.weight"])


def logits_of(fmt: Format, w: Weights, ids: list[int]) -> Tensor:
    """[T, V]"""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * w[f"{name}.weight"]

    positions = torch.arange(len(ids))
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    x = w[f"{fmt.embed}.weight"][ids]
    for layer in range(LAYERS):
        q, k, v = fmt.qkv(w, layer, norm(x, fmt.norms[0].format(layer)))
        q, k = fmt.rotate(q, positions), fmt.rotate(k, positions)
        k, v = (part.repeat_interleave(HEADS // part.shape[1], dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v).flatten(1)
        out = fmt.out.format(layer)
        x = x + linear(mixed, w[f"{out}.weight"], w.get(f"{out}.bias"))
        x = x + fmt.mlp(w, layer, norm(x, fmt.norms[1].format(layer)))
    return linear(norm(x, fmt.norms[2]), fmt.head_weight(w[f"{fmt.head}.weight"]))


_SIZES = dict(hidden_size=HIDDEN, num_attention_heads=HEADS, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
_LLAMA_SIZES = _SIZES | dict(
    intermediate_size=INNER, num_hidden_layers=LAYERS, vocab_size=VOCAB, rms_norm_eps=EPS, max_position_embeddings=128,
    hidden_act="silu", pad_token_id=0,
)  # fmt: skip
_LLAMA_NORMS = ("model.layers.{}.input_layernorm", "model.layers.{}.post_attention_layernorm", "model.norm")
_LLAMA_MLP = {
    "model.layers.{}.mlp.gate_proj.weight": (INNER, HIDDEN),
    "model.layers.{}.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.layers.{}.mlp.down_proj.weight": (HIDDEN, INNER),
}


def baichuan(architecture: str, head_weight: Callable[[Tensor], Tensor]) -> Format:
    return Format(
        config=_LLAMA_SIZES | dict(model_type="baichuan", architectures=[architecture]),
        shapes={
            "model.layers.{}.self_attn.W_pack.weight": (3 * HIDDEN, HIDDEN),
            "model.layers.{}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            "model.layers.{}.self_attn.rotary_emb.inv_freq": (DIM // 2,),
            **_LLAMA_MLP,
        },
        embed="model.embed_tokens",
        norms=_LLAMA_NORMS,
        out="model.layers.{}.self_attn.o_proj",
        head="lm_head",
        qkv=stacked("model.layers.{}.self_attn.W_pack", HEADS, bias=False),
        mlp=gated("model.layers.{}.mlp", "gate_proj", "up_proj", "down_proj"),
        rotate=rotate_halves,
        head_weight=head_weight,
    )


def chatglm(rotate: Callable[[Tensor, Tensor], Tensor], **config) -> Format:
    layer = "transformer.encoder.layers.{}"
    return Format(
        config=_SIZES | dict(
            model_type="chatglm", num_layers=LAYERS, ffn_hidden_size=INNER, kv_channels=DIM, padded_vocab_size=VOCAB,
            multi_query_attention=True, multi_query_group_num=GROUPS, seq_length=128, layernorm_epsilon=EPS,
            rmsnorm=True, post_layer_norm=True, add_bias_linear=False, add_qkv_bias=True, original_rope=True,
            apply_query_key_layer_scaling=True, apply_residual_connection_post_layernorm=False, pad_token_id=0,
        ) | config,
        shapes={
            f"{layer}.self_attention.query_key_value.weight": ((HEADS + 2 * GROUPS) * DIM, HIDDEN),
            f"{layer}.self_attention.query_key_value.bias": ((HEADS + 2 * GROUPS) * DIM,),
            f"{layer}.self_attention.dense.weight": (HIDDEN, HIDDEN),
            f"{layer}.mlp.dense_h_to_4h.weight": (2 * INNER, HIDDEN),
            f"{layer}.mlp.dense_4h_to_h.weight": (HIDDEN, INNER),
            "transformer.rotary_pos_emb.inv_freq": (DIM // 4,),
        },
        embed="transformer.embedding.word_embeddings",
        norms=(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "transformer.encoder.final_layernorm"),
        out=f"{layer}.self_attention.dense",
        head="transformer.output_layer",
        qkv=stacked(f"{layer}.self_attention.query_key_value", GROUPS),
        mlp=gate_above_up,
        rotate=rotate,
    )  # fmt: skip


FORMATS = {
    "qwen": Format(
        config=_SIZES | dict(
            model_type="qwen", architectures=["QWenLMHeadModel"], intermediate_size=2 * INNER, vocab_size=VOCAB,
            num_hidden_layers=LAYERS, kv_channels=DIM, layer_norm_epsilon=EPS, seq_length=96, no_bias=True,
            max_position_embeddings=8192, rotary_emb_base=10000, rotary_pct=1.0, scale_attn_weights=True,
            use_dynamic_ntk=True, use_logn_attn=True, auto_map={"AutoConfig": "configuration_qwen.QWenConfig"},
        ),
        shapes={
            "transformer.h.{}.attn.c_attn.weight": (3 * HIDDEN, HIDDEN),
            "transformer.h.{}.attn.c_attn.bias": (3 * HIDDEN,),
            "transformer.h.{}.attn.c_proj.weight": (HIDDEN, HIDDEN),
            "transformer.h.{}.mlp.w1.weight": (INNER, HIDDEN),
            "transformer.h.{}.mlp.w2.weight": (INNER, HIDDEN),
            "transformer.h.{}.mlp.c_proj.weight": (HIDDEN, INNER),
        },
        embed="transformer.wte",
        norms=("transformer.h.{}.ln_1", "transformer.h.{}.ln_2", "transformer.ln_f"),
        out="transformer.h.{}.attn.c_proj",
        head="lm_head",
        qkv=stacked("transformer.h.{}.attn.c_attn", HEADS),
        mlp=gated("transformer.h.{}.mlp", "w2", "w1", "c_proj"),
        rotate=rotate_halves,
    ),
    "chatglm3": chatglm(rotate_pairs(10000)),
    "chatglm3-32k": chatglm(rotate_pairs(10000 * 50), rope_ratio=50),
    "chatglm2-32k": chatglm(rotate_pairs(10000, stretch=4), rope_ratio=4, _name_or_path="THUDM/chatglm2-6b-32k"),
    "baichuan": baichuan("BaiChuanForCausalLM", lambda weight: weight),
    "baichuan2": baichuan("BaichuanForCausalLM", normalize),
    "internlm": Format(
        config=_LLAMA_SIZES | dict(model_type="internlm", bias=True, rotary={"base": 10000, "type": "dynamic"}),
        shapes={
            **{f"model.layers.{{}}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"},
            **{f"model.layers.{{}}.self_attn.{part}_proj.bias": (HIDDEN,) for part in "qkvo"},
            **_LLAMA_MLP,
        },
        embed="model.embed_tokens",
        norms=_LLAMA_NORMS,
        out="model.layers.{}.self_attn.o_proj",
        head="lm_head",
        qkv=apart,
        mlp=gated("model.layers.{}.mlp", "gate_proj", "up_proj", "down_proj"),
        rotate=rotate_halves,
    ),
    "internlm2": Format(
        config=_LLAMA_SIZES | dict(
            model_type="internlm2", bias=False, num_key_value_heads=GROUPS, rope_theta=10000,
            rope_scaling={"type": "dynamic", "factor": 2.0},
        ),
        shapes={
            "model.layers.{}.attention.wqkv.weight": ((HEADS + 2 * GROUPS) * DIM, HIDDEN),
            "model.layers.{}.attention.wo.weight": (HIDDEN, HIDDEN),
            "model.layers.{}.feed_forward.w1.weight": (INNER, HIDDEN),
            "model.layers.{}.feed_forward.w3.weight": (INNER, HIDDEN),
            "model.layers.{}.feed_forward.w2.weight": (HIDDEN, INNER),
        },
        embed="model.tok_embeddings",
        norms=("model.layers.{}.attention_norm", "model.layers.{}.ffn_norm", "model.norm"),
        out="model.layers.{}.attention.wo",
        head="output",
        qkv=grouped,
        mlp=gated("model.layers.{}.feed_forward", "w1", "w3", "w2"),
        rotate=rotate_halves,
    ),
}  # fmt: skip


def random_weights(fmt: Format) -> Weights:
    shapes = dict(fmt.shapes) | {f"{name}.weight": (HIDDEN,) for name in fmt.norms}
    shapes |= {f"{fmt.embed}.weight": (VOCAB, HIDDEN), f"{fmt.head}.weight": (VOCAB, HIDDEN)}
    torch.manual_seed(7)
    return {
        name.format(layer): torch.randn(shape) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
        for layer in (range(LAYERS) if "{}" in name else (0,))
    }


def write(folder: Path, config: dict, weights: Weights, kind: str = "bin") -> Path:
    """kind: "bin" or "safetensors"; in two files with an index, or in one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    stem, suffix = ("pytorch_model", ".bin") if "bin" in kind else ("model", ".safetensors")
    shards = [names] if "one" in kind else [names[::2], names[1::2]]
    files = [f"{stem}{suffix}"] if "one" in kind else [f"{stem}-{part}{suffix}" for part in ("1", "2")]
    for file, shard in zip(files, shards, strict=True):
        save = torch.save if suffix == ".bin" else save_file
        save({name: weights[name].clone() for name in shard}, folder / file)
    if "one" not in kind:
        index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_the_engine_computes_what_the_format_defines(name, tmp_path):
    """Logits of every position of a prompt, in two chunks over pages, and greedy tokens of several prompts at once."""
    fmt = FORMATS[name]
    weights = random_weights(fmt)
    kind = {"qwen": "safetensors", "chatglm3": "bin", "baichuan": "one bin"}.get(name, "one safetensors")
    runner = runner_of(write(tmp_path / "model", fmt.config, weights, kind))
    driver = Driver(runner)

    prompt = random_prompts([43], VOCAB)[0]
    seq = driver.sequence(prompt)
    seq.pages = [driver.free.pop() for _ in range(3)]
    rows = []
    for start, count in ((0, 30), (30, 13)):
        step = batch.build(Plan((Part(seq, start, count, True),), count), runner.backend, runner.pool)
        with torch.inference_mode():
            rows.append(runner.model.logits(runner.model.hidden(step.token_ids, step.positions, step)))
    expected = logits_of(fmt, weights, prompt)
    assert torch.allclose(torch.cat(rows), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.05, "logits that hardly differ would prove nothing"

    prompts = random_prompts([3, 17, 40], VOCAB, seed=1)
    outputs = driver.run([driver.sequence(each, max_tokens=6) for each in prompts])
    assert driver.max_batch == 3
    for prompt, output in zip(prompts, outputs, strict=True):
        best = logits_of(fmt, weights, prompt + output)[len(prompt) - 1 : -1].max(-1)
        assert best.indices.tolist() == output


def test_a_context_beyond_the_trained_one_is_refused(tmp_path):
    """Qwen-1 would change its attention there; max_position_embeddings of its config is only a table's size."""
    fmt = FORMATS["qwen"]
    folder = write(tmp_path / "model", fmt.config, random_weights(fmt))
    assert load(EngineConfig(str(folder), dtype="float32"), torch.device("cpu")).max_model_len == 96
    with pytest.raises(ModelLoadError, match="MAX_MODEL_LEN=97 is more than the 96 positions"):
        load(EngineConfig(str(folder), max_model_len=97), torch.device("cpu"))


def test_weights_get_the_dtype_that_is_asked_for_and_no_code_is_asked_for(tmp_path):
    fmt = FORMATS["qwen"]
    folder = write(tmp_path / "model", fmt.config | {"torch_dtype": "float16"}, random_weights(fmt), "safetensors")
    for trust in (False, True):
        model = load(EngineConfig(str(folder), dtype="bfloat16", trust_remote_code=trust), torch.device("cpu"))
        assert {parameter.dtype for parameter in model.hf.parameters()} == {torch.bfloat16}
        assert type(model.hf).__module__.startswith("transformers.models.qwen2.")


def test_load_format_chooses_among_files(tmp_path):
    """Both kinds are there; the one not asked for is broken."""
    fmt = FORMATS["baichuan"]
    folder = write(tmp_path / "model", fmt.config, random_weights(fmt), "one bin")
    (folder / "model.safetensors").write_bytes(b"broken")
    load(EngineConfig(str(folder), load_format="pt"), torch.device("cpu"))
    with pytest.raises(ModelLoadError, match="cannot load the weights of 'model'"):
        load(EngineConfig(str(folder)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("baichuan2", {"max_position_embeddings": None}, "Baichuan-13B and Baichuan2-13B use ALiBi"),
        ("baichuan2", {"hidden_size": 5120}, "Baichuan-13B and Baichuan2-13B use ALiBi"),
        ("chatglm3", {"padded_vocab_size": None}, "the first ChatGLM, with its two-dimensional positions, has no map"),
        ("chatglm3", {"rmsnorm": False}, "rmsnorm is False"),
        ("chatglm3", {"quantization_bit": 4}, "weights are quantized"),
        ("qwen", {"visual": {"width": 8}}, "images or sound"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct is 0.5"),
        ("qwen", {"seq_length": None}, "config.json has no 'seq_length'"),
        ("qwen", {"quantization_config": {"bits": 4}}, "weights are quantized"),
        ("internlm2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear' is not mapped"),
    ],
)
def test_what_no_map_covers_is_refused_by_name(name, change, message, tmp_path):
    """None takes a value away."""
    values = {key: value for key, value in {**FORMATS[name].config, **change}.items() if value is not None}
    folder = write(tmp_path / "model", values, {"a": torch.zeros(1)})
    with pytest.raises(ModelLoadError, match=f"the model type '{values['model_type']}' of 'model'.*{message}") as error:
        load(EngineConfig(str(folder)), torch.device("cpu"))
    assert "\n" not in str(error.value) and str(tmp_path) not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer.h.0.attn.c_extra.weight": torch.zeros(2)}, "transformer.h.0.attn.c_extra.weight is no part of"),
        ({"transformer.h.1.attn.c_attn.weight": torch.zeros(8, HIDDEN)}, "q, k and v has 8 rows instead of 144"),
        ({"transformer.h.1.ln_2.weight": torch.zeros(8)}, "mismatched|size|shape"),
        ({"transformer.h.1.ln_2.weight": None}, "missing keys model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_format_are_refused(change, message, tmp_path):
    fmt = FORMATS["qwen"]
    weights = {key: value for key, value in {**random_weights(fmt), **change}.items() if value is not None}
    folder = write(tmp_path / "model", fmt.config, weights)
    with pytest.raises(ModelLoadError, match=message):
        load(EngineConfig(str(folder)), torch.device("cpu"))
