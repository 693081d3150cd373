"""Tokenizer files of models that came with tokenizer code of their own, made into an ordinary tokenizer.json.

    converted(folder)   ->  the folder itself if it has a tokenizer.json, else a folder in the user's cache that has one

Two kinds of files are known: lists of base64 tokens by rank (`qwen.tiktoken` of Qwen-1, `tokenizer.model` of GLM-4),
and sentencepiece models (`tokenizer.model` of ChatGLM2/3, Baichuan, InternLM and the old Llamas). Beside tokenizer.json
the new folder has copies of the small files that describe tokens and templates, with what the model's code knew and
its files do not say. Knows nothing of requests; no code of a model is run.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import orjson

from worker.legacy_tokenizers import documents
from worker.legacy_tokenizers.documents import Document, added_token, with_prefix
from worker.legacy_tokenizers.sentencepiece_file import SentencePieceModel

FORMAT_VERSION = 1  # of what is in the cache
SOURCES = ("qwen.tiktoken", "tokenizer.model")
SMALL_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")

# How a text is cut into words before tokens are merged. The two differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]
_CHATGLM_SPECIALS = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"]
_CHATGLM3_ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
# Tokens that would be found within words if texts could spell them.
_UNSPELLED = {"sop", "eop"}


def converted(folder: Path, cache: Path | None = None) -> Path:
    """A folder with a tokenizer.json, made once for the same content of the files. `cache`: None = the user's.

    A folder with neither a tokenizer.json nor a file of a known kind is returned as it is. Raises ValueError."""
    source = next((folder / name for name in SOURCES if (folder / name).is_file()), None)
    if source is None or (folder / "tokenizer.json").is_file():
        return folder
    found = [file for pattern in SMALL_FILES for file in folder.glob(pattern)]
    small = sorted(file for file in found if not file.name.endswith(".index.json"))
    digest = hashlib.sha256(b"%d" % FORMAT_VERSION)
    for file in (source, *small):
        data = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(data)}\n".encode() + data)
    target = (cache or _cache()) / digest.hexdigest()[:24] / _name(folder)
    if not target.is_dir():
        _publish(target, folder, small, *_convert(folder, source))
    return target


def _cache() -> Path:
    """The user's cache, or a folder of this process where there is none to write to."""
    try:
        cache = Path.home() / ".cache" / "worker-paged" / "tokenizers"
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="worker-paged-"))
    return cache if os.access(cache, os.W_OK) else Path(tempfile.mkdtemp(prefix="worker-paged-"))


def _name(folder: Path) -> str:
    """The model's name, which may decide on its chat template; in a cache of the hub it is that of a folder above."""
    folder = folder.resolve()
    return folder.parent.parent.name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name


def _publish(target: Path, folder: Path, small: list[Path], document: Document, config: Document) -> None:
    """Several workers may start at once: the folder appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent))
    for file in small:
        copy = draft / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    (draft / "tokenizer.json").write_bytes(orjson.dumps(document))
    (draft / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    try:
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft)
        if not target.is_dir():
            raise


def _convert(folder: Path, source: Path) -> tuple[Document, Document]:
    """(tokenizer.json, tokenizer_config.json)"""
    config = _json(folder / "tokenizer_config.json")
    model_config = _json(folder / "config.json")
    is_chatglm = str(config.get("tokenizer_class")).startswith("ChatGLM") or model_config.get("model_type") == "chatglm"
    data = source.read_bytes()
    if source.name == "qwen.tiktoken":
        return _qwen(_ranks(data), config)
    if data[:1] == b"\n":  # the first field of a sentencepiece model
        model = SentencePieceModel.parse(data)
        if not is_chatglm:
            return _like_llama(model, config)
        names = " ".join(map(str, (_name(folder), config.get("name_or_path"), model_config.get("_name_or_path"))))
        return _chatglm(model, config, has_roles=not re.search("chatglm2|codegeex2", names.lower()))
    if is_chatglm:
        return _glm4(_ranks(data), config)
    raise ValueError("tokenizer.model is no sentencepiece model")


def _qwen(ranks: list[bytes], config: Document) -> tuple[Document, Document]:
    specials = {len(ranks) + n: token for n, token in enumerate(_QWEN_SPECIALS)}
    document = documents.byte_level(ranks, _WORDS.replace("DIGITS", ""), _added(specials, config), nfc=True)
    return document, {"eos_token": "<|endoftext|>", **config}


def _glm4(ranks: list[bytes], config: Document) -> tuple[Document, Document]:
    """Its special tokens are all in tokenizer_config.json."""
    added = _added({}, config)
    if not {"[gMASK]", "<sop>"} <= {token["content"] for token in added}:
        raise ValueError("tokenizer_config.json does not list the special tokens of GLM-4")
    document = documents.byte_level(ranks, _WORDS.replace("DIGITS", "{1,3}"), added, nfc=False)
    return with_prefix(document, ["[gMASK]", "<sop>"]), config


def _chatglm(model: SentencePieceModel, config: Document, *, has_roles: bool) -> tuple[Document, Document]:
    """`has_roles`: since ChatGLM3 there are tokens for the roles."""
    tokens = [*_CHATGLM_SPECIALS, *(_CHATGLM3_ROLES if has_roles else ())]
    ids = {token: len(model.pieces) + n for n, token in enumerate(tokens)}
    listed = config.get("added_tokens_decoder") or {}
    extra = config.get("additional_special_tokens") or []
    config = {
        "eos_token": model.named.get("eos"),
        **config,
        "added_tokens_decoder": {key: token for key, token in listed.items() if token["content"] not in _UNSPELLED},
        "additional_special_tokens": [token for token in extra if token not in _UNSPELLED],
    }
    spelled = {token_id: token for token, token_id in ids.items() if token not in _UNSPELLED}
    hidden = {token: token_id for token, token_id in ids.items() if token in _UNSPELLED}
    document = documents.sentencepiece(model, _added(spelled, config), hidden)
    return with_prefix(document, ["[gMASK]", "sop"]), config


def _like_llama(model: SentencePieceModel, config: Document) -> tuple[Document, Document]:
    named = {f"{name}_token": token for name, token in model.named.items()}
    document = documents.sentencepiece(model, _added({}, config), {})
    return with_prefix(document, [model.named["bos"]] if "bos" in model.named else []), named | config


def _ranks(data: bytes) -> list[bytes]:
    """The tokens of a file with lines of base64 and rank."""
    try:
        pairs = [
            (base64.b64decode(token, validate=True), int(rank)) for token, rank in map(bytes.split, data.splitlines())
        ]
    except ValueError:
        raise ValueError("the tokenizer's file is no list of base64 tokens") from None
    if not pairs or [rank for _, rank in pairs] != list(range(len(pairs))):
        raise ValueError("the ranks in the tokenizer's file are not 0, 1, 2 ...")
    return [token for token, _ in pairs]


def _added(specials: dict[int, str], config: Document) -> list[Document]:
    """The tokens that tokenizer_config.json lists, and `specials` where it lists none for their ids."""
    tokens = {token_id: added_token(token_id, text, special=True) for token_id, text in specials.items()}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        flags = {key: bool(token.get(key)) for key in ("special", "normalized", "lstrip", "rstrip", "single_word")}
        tokens[int(token_id)] = added_token(int(token_id), token["content"], **flags)
    return [tokens[token_id] for token_id in sorted(tokens)]


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{file.name} is not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}
