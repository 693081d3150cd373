"""A copy of a tokenizer in which no text can spell a control token: every added token has a secret name there.

names = secret_names(added)                        # id -> the name to write where the token is meant
backend = chat_backend(document, added, names)     # encodes text with such names in it
"""

from __future__ import annotations

import secrets
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend


class TokenizerError(Exception):
    """The tokenizer of a model folder cannot be used. The message is one line for the operator."""


def read_backend(document: dict[str, Any]) -> Backend:
    """The tokenizer of a tokenizer.json. Raises TokenizerError."""
    try:
        return Backend.from_str(orjson.dumps(document).decode())
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"tokenizer.json cannot be read: {error}") from None


def secret_names(added: dict[int, AddedToken]) -> dict[int, str]:
    """Names that no user can guess, by id. Runs of spaces keep theirs: they are text, and text may contain them."""
    nonce = secrets.token_hex(8)
    return {
        token_id: f"\ue000{nonce}.{token_id}\ue001" if token.content.strip() else token.content
        for token_id, token in added.items()
    }


def chat_backend(document: dict[str, Any], added: dict[int, AddedToken], names: dict[int, str]) -> Backend:
    """The same tokenizer with every added token renamed, in the list of added tokens and in the model."""
    renamed = {token.content: names[token_id] for token_id, token in added.items()}
    entries = [
        {
            "id": token_id,
            "content": names[token_id],
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "special": token.special,
        }
        for token_id, token in sorted(added.items())
    ]
    backend = read_backend(
        document
        | {
            "added_tokens": entries,
            "model": _renamed_model(document["model"], renamed),
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
    )
    for token_id, name in names.items():
        if backend.token_to_id(name) != token_id:
            raise TokenizerError(f"tokenizer.json gives the added token {added[token_id].content!r} two ids")
    return backend


def _renamed_model(model: dict[str, Any], renamed: dict[str, str]) -> dict[str, Any]:
    """The model section with tokens renamed, and without merges that would still build one of them from text."""
    vocab = model["vocab"]
    changed = {old for old, new in renamed.items() if old != new}
    if isinstance(vocab, dict):
        present = changed & vocab.keys()
        vocab = {renamed.get(token, token): token_id for token, token_id in vocab.items()} if present else vocab
    else:
        present = changed & {token for token, _ in vocab}
        vocab = [[renamed.get(token, token), score] for token, score in vocab] if present else vocab
    model = model | {"vocab": vocab}
    if present and "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, present)]
    if model.get("unk_token") in present:
        model["unk_token"] = renamed[model["unk_token"]]
    return model


def _touches(merge: list[str] | str, tokens: set[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in tokens or right in tokens or left + right in tokens
