"""Checkpoints that came with modelling code of their own, read into classes that transformers has.

    native_config(values, folder)     config.json of such a model -> the native class's values; any other: unchanged
    native_weights(config, folder)    its tensors under the native names; None for any other model

A map is two things: a function from the old config to the native one, which refuses what the native class does not
compute, and a table from old module names to new ones. Within the length that a model was trained for the result is
what its own code computes; longer contexts (Qwen's logn attention, dynamic NTK) are not offered. No code of a
checkpoint is ever run. Knows nothing of devices, dtypes and attention: `engine.checkpoint` loads them as any other.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Values = dict[str, Any]

# What old and native configs call alike.
_ALIKE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "torch_dtype", "dtype")


def native_config(values: Values, folder: Path) -> Values:
    """Raises ValueError: the model is of a type that has a map, but has something that the map does not cover."""
    read = _CONFIGS.get(values.get("model_type", ""))
    if read is None:
        return values
    if values.get("quantization_config") or values.get("quantization_bit"):
        raise ValueError("its weights are quantized; only the unquantized checkpoints of this type can be read")
    try:
        return {key: values[key] for key in _ALIKE if key in values} | read(values, folder)
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]!r}") from None


def native_weights(
    config: Any, folder: Path, *, use_safetensors: bool | None = None, gguf_file: str | None = None
) -> dict[str, Tensor] | None:
    """`config`: the object made of `native_config`'s values. The tensors are views of the files wherever possible.
    Raises ValueError."""
    if (legacy_format := getattr(config, "legacy_format", None)) is None:
        return None
    if gguf_file is not None:
        raise ValueError("the GGUF files of this model type cannot be read")
    modules = _MODULES[legacy_format]
    weights: dict[str, Tensor] = {}
    for name, tensor in _tensors(folder, use_safetensors):
        module, _, kind = name.rpartition(".")  # kind: weight or bias
        if kind == "inv_freq":  # computed anew
            continue
        layer = match[1] if (match := re.search(r"\.(\d+)\.", module)) else ""
        targets = modules.get(re.sub(r"\.\d+\.", ".N.", module, count=1))
        if targets is None:
            raise ValueError(f"its tensor {name} is no part of the format {legacy_format}")
        for target, part in zip(targets, _parts(tensor, len(targets), legacy_format, config), strict=True):
            weights[f"{target.replace('.N.', f'.{layer}.')}.{kind}"] = part
    if legacy_format == "baichuan2" and "lm_head.weight" in weights:  # its head uses the directions of its rows only
        weights["lm_head.weight"] = nn.functional.normalize(weights["lm_head.weight"].float())
    return weights


def _qwen(values: Values, folder: Path) -> Values:
    """Qwen-1. Its first release named some of the sizes differently."""
    if "visual" in values or "audio" in values:
        raise ValueError("it takes images or sound; only the models for text are mapped")
    _expect(values, no_bias=True, rotary_pct=1.0, scale_attn_weights=True)
    heads = values["num_attention_heads"] if "num_attention_heads" in values else values["n_head"]
    hidden_size = values["hidden_size"] if "hidden_size" in values else values["n_embd"]
    inner_size = values["intermediate_size"] if "intermediate_size" in values else values["ffn_hidden_size"]
    return {
        "model_type": "qwen2",
        "legacy_format": "qwen",
        "vocab_size": values.get("padded_vocab_size") or values["vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": inner_size // 2,  # of gate and up together
        "num_hidden_layers": values["num_hidden_layers"] if "num_hidden_layers" in values else values["n_layer"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": values.get("kv_channels") or hidden_size // heads,
        "rms_norm_eps": values.get("layer_norm_epsilon", 1e-6),
        "max_position_embeddings": values["seq_length"],
        "rope_parameters": _rope(values.get("rotary_emb_base", 10000.0)),
    }


def _chatglm(values: Values, folder: Path) -> Values:
    """ChatGLM2, ChatGLM3, CodeGeeX2, and GLM-4 in the same format."""
    if "padded_vocab_size" not in values:
        raise ValueError("the first ChatGLM, with its two-dimensional positions, has no map")
    _expect(
        values,
        multi_query_attention=True,
        rmsnorm=True,
        post_layer_norm=True,
        apply_residual_connection_post_layernorm=False,
        add_bias_linear=False,
        pre_seq_len=None,
    )
    ratio = values.get("rope_ratio", 1)
    rope = _rope(10000.0 * ratio) | {"partial_rotary_factor": 0.5}
    if ratio != 1 and _is_chatglm2(values, folder):  # its long variant compresses positions, its successors the angles
        trained = int(values["seq_length"] / ratio)
        rope |= _rope(10000.0) | {"rope_type": "linear", "factor": ratio, "original_max_position_embeddings": trained}
    return {
        "model_type": "glm",
        "legacy_format": "chatglm",
        "vocab_size": values["padded_vocab_size"],
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["ffn_hidden_size"],
        "num_hidden_layers": values["num_layers"],
        "num_attention_heads": values["num_attention_heads"],
        "num_key_value_heads": values["multi_query_group_num"],
        "head_dim": values.get("kv_channels") or values["hidden_size"] // values["num_attention_heads"],
        "attention_bias": values.get("add_qkv_bias", False),
        "rms_norm_eps": values["layernorm_epsilon"],
        "max_position_embeddings": values["seq_length"],
        "pad_token_id": values.get("pad_token_id"),
        "rope_parameters": rope,
    }


def _is_chatglm2(values: Values, folder: Path) -> bool:
    """Nothing in config.json tells but the name; in a cache of the hub the model's name is that of a folder above."""
    names = [folder.name, str(values.get("_name_or_path", "")), *(parent.name for parent in folder.parents[:2])]
    return any("chatglm2" in name.lower() for name in names)


def _baichuan(values: Values, folder: Path) -> Values:
    """Baichuan-7B and Baichuan2-7B."""
    if "max_position_embeddings" not in values or values["hidden_size"] == 5120:
        raise ValueError("Baichuan-13B and Baichuan2-13B use ALiBi, which the attention here does not have")
    auto_map = values.get("auto_map") or {}
    named = [*(values.get("architectures") or ()), str(auto_map.get("AutoModelForCausalLM", ""))]
    second = any(name.endswith("BaichuanForCausalLM") for name in named)  # the first one's class is BaiChuanForCausalLM
    return _llama(values) | {"legacy_format": "baichuan2" if second else "baichuan"}


def _internlm(values: Values, folder: Path) -> Values:
    rotary = values.get("rotary") or {}
    bias = values.get("bias", True)
    rope = _rope(rotary.get("base", 10000.0))  # its "dynamic" changes nothing within max_position_embeddings
    return _llama(values) | {"legacy_format": "internlm", "attention_bias": bias, "rope_parameters": rope}


def _internlm2(values: Values, folder: Path) -> Values:
    scaling = values.get("rope_scaling") or {}
    if scaling.get("type", "dynamic") != "dynamic":
        raise ValueError(f"rope_scaling of the type {scaling['type']!r} is not mapped")
    bias = values.get("bias", False)
    return _llama(values) | {"legacy_format": "internlm2", "attention_bias": bias}


def _llama(values: Values) -> Values:
    """For configs that are Llama's but for their model type."""
    alike = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    alike = (*alike, "rms_norm_eps", "max_position_embeddings")
    return {
        "model_type": "llama",
        **{key: values[key] for key in alike},
        "num_key_value_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
        "hidden_act": values.get("hidden_act", "silu"),
        "rope_parameters": _rope(values.get("rope_theta", 10000.0)),
    }


def _rope(theta: float) -> Values:
    return {"rope_type": "default", "rope_theta": float(theta)}


def _expect(values: Values, **expected: Any) -> None:
    for key, value in expected.items():
        if (found := values.get(key, value)) != value:
            raise ValueError(f"{key} is {found!r}; only models with {value!r} are mapped")


def _parts(tensor: Tensor, count: int, legacy_format: str, config: Any) -> tuple[Tensor, ...]:
    """The rows of q, k and v where a tensor holds all three."""
    if count == 1:
        return (tensor,)
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if len(tensor) != (heads + 2 * groups) * width:
        raise ValueError(f"a tensor of q, k and v has {len(tensor)} rows instead of {(heads + 2 * groups) * width}")
    if legacy_format == "internlm2":  # of each key's group: its queries, the key, the value
        grouped = tensor.unflatten(0, (groups, heads // groups + 2, width))
        return grouped[:, :-2].flatten(0, 2), grouped[:, -2].flatten(0, 1), grouped[:, -1].flatten(0, 1)
    return tensor.split([heads * width, groups * width, groups * width])


def _tensors(folder: Path, use_safetensors: bool | None) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the checkpoint, mapped into memory."""
    for file in _files(folder, use_safetensors):
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, "pt") as opened:
                names = opened.keys()
                for name in names:
                    yield name, opened.get_tensor(name)
        else:  # weights_only: tensors, and no code
            yield from torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)).items()


def _files(folder: Path, use_safetensors: bool | None) -> list[Path]:
    names = {None: ("model.safetensors", "pytorch_model.bin"), True: ("model.safetensors",)}
    for name in names.get(use_safetensors, ("pytorch_model.bin",)):
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError("it has no model.safetensors or pytorch_model.bin, in one file or with an index")


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Lines of an old and a new module name; N is the number of the layer, QKV stands for three projections."""
    pairs = (line.split() for line in text.strip().splitlines())
    return {old: tuple(new.replace("QKV", f"{x}_proj") for x in ("qkv" if "QKV" in new else "-")) for old, new in pairs}


_CONFIGS = {
    "qwen": _qwen,
    "chatglm": _chatglm,
    "baichuan": _baichuan,
    "internlm": _internlm,
    "internlm2": _internlm2,
}
_LLAMA = """
    model.embed_tokens                        model.embed_tokens
    model.layers.N.input_layernorm            model.layers.N.input_layernorm
    model.layers.N.self_attn.o_proj           model.layers.N.self_attn.o_proj
    model.layers.N.post_attention_layernorm   model.layers.N.post_attention_layernorm
    model.layers.N.mlp.gate_proj              model.layers.N.mlp.gate_proj
    model.layers.N.mlp.up_proj                model.layers.N.mlp.up_proj
    model.layers.N.mlp.down_proj              model.layers.N.mlp.down_proj
    model.norm                                model.norm
    lm_head                                   lm_head
"""
_BAICHUAN = _table(f"{_LLAMA} model.layers.N.self_attn.W_pack  model.layers.N.self_attn.QKV")
_MODULES = {
    "qwen": _table("""
        transformer.wte                 model.embed_tokens
        transformer.h.N.ln_1            model.layers.N.input_layernorm
        transformer.h.N.attn.c_attn     model.layers.N.self_attn.QKV
        transformer.h.N.attn.c_proj     model.layers.N.self_attn.o_proj
        transformer.h.N.ln_2            model.layers.N.post_attention_layernorm
        transformer.h.N.mlp.w2          model.layers.N.mlp.gate_proj
        transformer.h.N.mlp.w1          model.layers.N.mlp.up_proj
        transformer.h.N.mlp.c_proj      model.layers.N.mlp.down_proj
        transformer.ln_f                model.norm
        lm_head                         lm_head
    """),
    "chatglm": _table("""
        transformer.embedding.word_embeddings                        model.embed_tokens
        transformer.encoder.layers.N.input_layernorm                 model.layers.N.input_layernorm
        transformer.encoder.layers.N.self_attention.query_key_value  model.layers.N.self_attn.QKV
        transformer.encoder.layers.N.self_attention.dense            model.layers.N.self_attn.o_proj
        transformer.encoder.layers.N.post_attention_layernorm        model.layers.N.post_attention_layernorm
        transformer.encoder.layers.N.mlp.dense_h_to_4h               model.layers.N.mlp.gate_up_proj
        transformer.encoder.layers.N.mlp.dense_4h_to_h               model.layers.N.mlp.down_proj
        transformer.encoder.final_layernorm                          model.norm
        transformer.output_layer                                     lm_head
    """),
    "baichuan": _BAICHUAN,
    "baichuan2": _BAICHUAN,
    "internlm": _table(
        _LLAMA
        + "\n".join(f"model.layers.N.self_attn.{x}_proj  model.layers.N.self_attn.{x}_proj" for x in ("q", "k", "v"))
    ),
    "internlm2": _table("""
        model.tok_embeddings            model.embed_tokens
        model.layers.N.attention_norm   model.layers.N.input_layernorm
        model.layers.N.attention.wqkv   model.layers.N.self_attn.QKV
        model.layers.N.attention.wo     model.layers.N.self_attn.o_proj
        model.layers.N.ffn_norm         model.layers.N.post_attention_layernorm
        model.layers.N.feed_forward.w1  model.layers.N.mlp.gate_proj
        model.layers.N.feed_forward.w3  model.layers.N.mlp.up_proj
        model.layers.N.feed_forward.w2  model.layers.N.mlp.down_proj
        model.norm                      model.norm
        output                          lm_head
    """),
}
