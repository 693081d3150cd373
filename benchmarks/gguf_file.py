"""The demo model's weights as a GGUF file, so that llama.cpp serves the very same model.

    python -m benchmarks.gguf_file [--model FOLDER] [--format bf16|f16|f32|q8_0|q4_0|q4_1]      prints the file

Norms are float32 in every format; matrices have the format asked for, but with 4-bit formats the embedding (also the
output layer) keeps 8 bits. Knows Llama-shaped models with tied embeddings and byte-level BPE, which the demo model is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Format
from safetensors import safe_open

FORMATS = {format.name.lower(): format for format in (
    Format.F32, Format.F16, Format.BF16, Format.Q8_0, Format.Q4_0, Format.Q4_1
)}  # fmt: skip
FILE_TYPES = {Format.F32: gguf.LlamaFileType.ALL_F32} | {
    format: gguf.LlamaFileType[f"MOSTLY_{format.name}"] for format in FORMATS.values() if format != Format.F32
}
PLAIN = {Format.F32, Format.F16}  # numpy types that the writer describes by itself
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def ensure(model: Path, folder: Path, format: str) -> Path:
    """`<folder>/<model>-<format>.gguf`, written now if it is not there."""
    file = folder / f"{model.name}-{format}.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        write(model, unfinished, FORMATS[format])
        unfinished.rename(file)
    return file


def write(model: Path, file: Path, format: Format) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"] or not config["tie_word_embeddings"]:
        raise ValueError("only Llama models with tied embeddings can be written")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_file_type(FILE_TYPES[format])
    _add_shape(writer, config, model.name)
    _add_tokenizer(writer, model, config)
    for name, weight in _weights(model, config):
        kind = format if weight.ndim > 1 else Format.F32
        if name.startswith("token_embd") and format in (Format.Q4_0, Format.Q4_1):
            kind = Format.Q8_0
        data = gguf.quantize(weight, kind)
        writer.add_tensor(name, data, raw_dtype=None if kind in PLAIN else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any], name: str) -> None:
    heads = config["num_attention_heads"]
    writer.add_name(name)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    described = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    control = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")  # every digit alone, then byte-level BPE
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in control else gguf.TokenType.NORMAL for index in range(len(ids))]
    )
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(described["chat_template"])


def _weights(model: Path, config: dict[str, Any]) -> Any:
    """(name in GGUF, float32 array) of every tensor."""
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            weight = tensors.get_tensor(name).float().numpy()
            part = name.removesuffix(".weight")
            if part.endswith("q_proj"):
                weight = _paired(weight, config["num_attention_heads"])
            elif part.endswith("k_proj"):
                weight = _paired(weight, config["num_key_value_heads"])
            if part.startswith("model.layers."):
                _, _, layer, part = part.split(".", 3)
                yield f"blk.{layer}.{NAMES[part]}.weight", weight
            else:
                yield f"{NAMES[part]}.weight", weight


def _paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Q or K projection, from Hugging Face's order (rotary halves apart) to llama.cpp's (pairs)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def main() -> None:
    from benchmarks.peers import CACHE
    from builder import demo_model

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="model folder; default: the demo model")
    parser.add_argument("--format", choices=list(FORMATS), default="bf16")
    arguments = parser.parse_args()
    model = arguments.model or demo_model.ensure(lambda line: print(line, file=sys.stderr))
    print(ensure(model, CACHE / "gguf", arguments.format))


if __name__ == "__main__":
    main()
