"""Vocabularies -> the document that tokenizer.json is. Knows the two kinds of byte pair encoding, and no model.

    byte_level      tokens are byte strings; texts are cut into words; the merge with the lowest rank comes first
    sentencepiece   tokens are texts; spaces are marks; nothing is cut; the merge with the highest score comes first

Both rank merges by their result, a tokenizer.json lists pairs: so every pair whose result is a token becomes a merge.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Container, Iterable
from typing import Any

from worker.legacy_tokenizers.sentencepiece_file import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, SentencePieceModel
from worker.token_bytes import byte_of_char

Document = dict[str, Any]


def byte_level(ranks: list[bytes], words: str, added: list[Document], *, nfc: bool) -> Document:
    """`ranks`: the tokens by id; `words`: the pattern that cuts a text; `added`: the tokens behind them."""
    char_of_byte = {byte: char for char, byte in byte_of_char().items()}
    names = ["".join(map(char_of_byte.__getitem__, token)) for token in ranks]
    vocab = {name: rank for rank, name in enumerate(names)}
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _document(
        _bpe(vocab, _merges(names, vocab), ignore_merges=True),  # a word that is a token is not taken apart
        added,
        normalizer={"type": "NFC"} if nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, to_bytes]},
        decoder=to_bytes,
    )


def sentencepiece(model: SentencePieceModel, added: list[Document], hidden: dict[str, int]) -> Document:
    """`added`: tokens behind those of the model, or instead of some of them; `hidden`: more tokens behind those of the
    model, which no text becomes. Raises ValueError."""
    if model.model_type != "bpe":
        raise ValueError(f"sentencepiece models of the type {model.model_type} are not supported, only bpe")
    vocab = {text: token_id for token_id, (text, _, _) in enumerate(model.pieces)} | hidden
    for token in added:
        if token["id"] < len(model.pieces):
            vocab.pop(model.pieces[token["id"]][0], None)
        vocab[token["content"]] = token["id"]
    taken = {token["id"] for token in added}
    own = [(token_id, text, kind) for token_id, (text, _, kind) in enumerate(model.pieces) if token_id not in taken]
    special = [added_token(token_id, text, special=True) for token_id, text, kind in own if kind in (CONTROL, UNKNOWN)]
    # Looked for in the normalized text, as sentencepiece does: what follows them is no new beginning.
    user_defined = [
        added_token(token_id, text, normalized=True) for token_id, text, kind in own if kind == USER_DEFINED
    ]
    normal = sorted((-score, token_id) for token_id, (_, score, kind) in enumerate(model.pieces) if kind == NORMAL)
    tokens = [model.pieces[token_id][0] for _, token_id in normal if token_id not in taken]
    return _document(
        _bpe(vocab, _merges(tokens, set(tokens)), unk_token=model.named.get("unk"), byte_fallback=model.byte_fallback),
        sorted([*added, *special, *user_defined], key=lambda token: int(token["id"])),
        normalizer={"type": "Sequence", "normalizers": _normalizers(model, user_defined)},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": _decoders(model)},
    )


def added_token(token_id: int, content: str, **flags: bool) -> Document:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content, **plain, **flags}


def with_prefix(document: Document, tokens: list[str]) -> Document:
    """The same tokenizer with `tokens` before every text."""
    vocab = document["model"]["vocab"] | {token["content"]: token["id"] for token in document["added_tokens"]}
    before = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    texts = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    special = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in tokens}
    single, pair = [*before, texts[0]], [*before, *texts]
    processor = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return document | {"post_processor": processor if tokens else None}


def _merges(tokens: Iterable[str], known: Container[str]) -> list[tuple[str, str]]:
    """All ways to put the tokens together from two that are known, in the order of the tokens."""
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _normalizers(model: SentencePieceModel, user_defined: list[Document]) -> list[Document]:
    steps: list[Document] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.remove_extra_whitespaces:
        steps += [_replace({"Regex": r"\A +"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append(_replace({"String": " "}, "▁"))
    if model.remove_extra_whitespaces:
        steps.append(_replace({"Regex": r"▁+\z"}, ""))  # at the end also marks that the text itself brings
    if model.add_dummy_prefix and user_defined:
        # The tokenizer normalizes the names of these tokens too, before it looks for them. In chats they have other
        # names, set between two marks (see `worker.tokenizer`).
        names = "|".join([*(re.escape(token["content"]) for token in user_defined), "\ue000[^\ue001]*\ue001"])
        steps.append(_replace({"Regex": rf"\A▁(?=(?:{names})\z)"}, ""))
    return steps


def _decoders(model: SentencePieceModel) -> list[Document]:
    steps: list[Document] = [_replace({"String": "▁"}, " ")]
    if model.byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if model.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def _replace(pattern: dict[str, str], content: str) -> Document:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _bpe(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> Document:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk_token is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _document(model: Document, added: list[Document], **steps: Any) -> Document:
    parts = {"truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
    return {"version": "1.0", **parts, **steps, "model": model}
