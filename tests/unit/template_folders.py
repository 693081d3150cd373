"""Model folders for the tests of templates: a tiny byte-level tokenizer and the files that name a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def make_folder(
    folder: Path,
    chat_template: Any = None,
    *,
    tokens: Sequence[str] = CHATML_TOKENS,
    plain_tokens: Sequence[str] = (),
    split_tokens: Sequence[str] = (),
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
) -> Path:
    """`tokens` are special tokens, `plain_tokens` added tokens that are not special, `split_tokens` are in the
    vocabulary, but no text becomes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *split_tokens])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain_tokens])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if chat_template is not None:
        about["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(about | (tokenizer_config or {})), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of"} | (config or {})), encoding="utf-8")
    return folder


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(text: Any, call_id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def calls(*functions: tuple[str, Any], content: Any = None) -> dict[str, Any]:
    made = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(functions, 1)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
