"""Real templates as model folders: a small tokenizer that has every control token which the template writes.

The vocabulary is byte-level with a few merges: enough for ids to depend on how a text is cut.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# Which of the template's words in brackets are tokens: enough of the usual forms to cover all families.
TOKEN_FORMS = (
    r"<\|[A-Za-z0-9_:/ .-]+\|?>",  # <|im_start|>, <|turn>
    r"<[A-Za-z0-9_:]+\|>",  # <turn|>
    r"<｜[^<>｜]+｜>",
    r"<｜?/?(?:think|tool_call|tool_response|arg_key|arg_value|s|bos|eos|pad|sop|unk)>",
    r"</?seed:[a-z_]+>",
    r"<(?:start|end)_of_(?:turn|sentence|document)>",
    r"</?assistant>|<sep>|<SPECIAL_[0-9]+>",
    r"\[/?[A-Z][A-Z_]+\]",  # [INST]
    r"\[gMASK\]",
    r"\]~[a-z!]+\[?",
    r"\[e~\[",
)
CORPUS = [
    "You are a helpful assistant. The quick brown fox jumps over the lazy dog, again and again.",
    "user assistant system tool function name description parameters type string object properties required",
    'What is the weather in Paris?\n\n{"location": "Paris", "unit": "celsius"}\n',
]


def control_tokens(source: str) -> list[str]:
    found = {match for form in TOKEN_FORMS for match in re.findall(form, source)}
    return sorted(found | {"<s>", "</s>"})


def make_folder(source: str, folder: Path, extra: dict[str, object] | None = None) -> Path:
    """A model folder (tokenizer and template only) for a template's source."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, source], trainer)
    tokens = control_tokens(source)
    special = [token for token in tokens if not token.startswith(("<think", "</think", "<tool_call", "</tool_call"))]
    for token in tokens:
        tokenizer.add_tokens([AddedToken(token, special=token in special, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": source,
        "clean_up_tokenization_spaces": False,
        **(extra or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
