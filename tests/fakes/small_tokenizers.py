"""Small tokenizers of the kinds that models have, trained on a few sentences in milliseconds; real in every way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. 12345 times!",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "Übermäßig schöne Grüße, naïve café, piñata",
    "hello world, hello there; user system assistant tool call",
] * 4
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_bpe(style: str) -> Tokenizer:
    """As Llama and Mistral have it: byte tokens, a mark for spaces, BOS before a text.

    style: "prepend" (a normalizer puts the mark before every stretch of text) or "first" (only where the text begins).
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if style == "prepend":
        trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        trained.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        trained.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    # One word at a time while training, or the longest merges are whole sentences.
    words = [word for sentence in SENTENCES for word in sentence.replace(" ", "\n▁").split("\n")]
    normalizer, pre_tokenizer = trained.normalizer, trained.pre_tokenizer
    trained.normalizer, trained.pre_tokenizer = normalizers.Sequence([]), pre_tokenizers.Sequence([])
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIALS, *BYTES], initial_alphabet=["▁", "\n"], show_progress=False
    )
    trained.train_from_iterator(words, trainer)
    document = json.loads(trained.to_str())
    # The byte tokens are ordinary entries of the vocabulary, never matched in text.
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] in SPECIALS]
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(document))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([AddedToken("[INST]", special=True), AddedToken("[/INST]", special=True)])
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("<end>", normalized=False, rstrip=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def byte_level_bpe() -> Tokenizer:
    """As GPT-2, Qwen and Llama 3 have it, the control tokens partly in the model's own vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("    ", normalized=False)])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 and XLM-R have it: the best segmentation by scores, which would find <s> in any text."""
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -3.0)]
    vocabulary += [(piece, -4.0) for piece in ("▁hello", "▁world", "ing", "er", "us", "s>", "</")]
    vocabulary += [(char, -6.0) for char in "abcdefghijklmnopqrstuvwxyz<>/|.,!?\n_0123456789"]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT has it: a decoder that is neither byte-level nor sentencepiece."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "un", "##believ", "##able", ",", "."]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Writes the tokenizer as a model folder has it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
