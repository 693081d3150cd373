"""What a model folder says about its chat format. Reads small JSON and template files; raises TemplateError.

Knows no template language and no rules: `templates.resolution` decides what is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from templates.rendered import TemplateError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFiles:
    names: tuple[str, ...] = ()  # what the model is called: its folder, and what it was made from
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    vocab_size: int = 0
    special_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    added_tokens: frozenset[str] = frozenset()  # texts of all added tokens, special or not
    is_token: Callable[[str], bool] = lambda token: False  # whether the vocabulary has a token of that name
    adds_bos: bool = False  # the tokenizer puts bos before every text
    templates: dict[str, str] = field(default_factory=dict)  # "default", "tool_use" ... -> Jinja
    template_file: str = ""  # where "default" was found


class Vocabulary(Protocol):
    """A tokenizer that is loaded already (`worker.tokenizer.Tokenizer`)."""

    added_tokens: dict[str, int]
    prefix_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None

    def token_id(self, token: str) -> int | None: ...


def read(folder: Path, tokenizer: Vocabulary | None = None) -> ModelFiles:
    """Without a tokenizer, what there is to know about tokens is read from tokenizer.json."""
    config = _json(folder / "config.json")
    tokenizer_config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    special_tokens = {
        name: content for name in NAMED_TOKENS if (content := token_text(tokenizer_config.get(name))) is not None
    }
    templates, template_file = _templates(folder, tokenizer_config)
    text_config = config.get("text_config") or {}
    tokens = _tokens(_json(folder / "tokenizer.json"), tokenizer_config) if tokenizer is None else _of(tokenizer)
    special_tokens = {**tokens.special, **special_tokens}
    return ModelFiles(
        names=_names(folder, config),
        model_type=str(config.get("model_type") or ""),
        architectures=tuple(config.get("architectures") or ()),
        vocab_size=int(
            config.get("vocab_size") or config.get("padded_vocab_size") or text_config.get("vocab_size") or 0
        ),
        special_tokens=special_tokens,
        added_tokens=tokens.added | frozenset(special_tokens.values()),
        is_token=tokens.has,
        adds_bos=tokens.adds_bos,
        templates=templates,
        template_file=template_file,
    )


def _names(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """What the model is called: its folder (in a hub's cache: models--ORG--NAME/snapshots/REVISION), and what its
    config says that it was made from."""
    folder = folder.resolve()
    own = folder.parent.parent.name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name
    origin = str(config.get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    return tuple(name for name in (own, origin) if name)


@dataclass(frozen=True)
class _Tokens:
    added: frozenset[str]
    has: Callable[[str], bool]
    adds_bos: bool
    special: dict[str, str] = field(default_factory=dict)


def _of(tokenizer: Vocabulary) -> _Tokens:
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    return _Tokens(
        added=frozenset(tokenizer.added_tokens),
        has=lambda token: tokenizer.token_id(token) is not None,
        adds_bos=bos is not None and tokenizer.token_id(bos) in tokenizer.prefix_ids,
        special={name: token for name, token in (("bos_token", bos), ("eos_token", eos)) if token},
    )


def _tokens(tokenizer: dict[str, Any], config: dict[str, Any]) -> _Tokens:
    listed = [*(tokenizer.get("added_tokens") or ()), *(config.get("added_tokens_decoder") or {}).values()]
    for key in (*NAMED_TOKENS, "additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or ()
        listed += more.values() if isinstance(more, dict) and "content" not in more else _listed(more)
    added = frozenset(content for token in listed if (content := token_text(token)) is not None)
    vocab = (tokenizer.get("model") or {}).get("vocab") or ()
    known = added.union(vocab if isinstance(vocab, dict) else (entry[0] for entry in vocab))
    bos = token_text(config.get("bos_token"))
    switch = config.get("add_bos_token")
    adds_bos = switch if isinstance(switch, bool) else bool(bos) and str(bos) in str(tokenizer.get("post_processor"))
    return _Tokens(added, known.__contains__, adds_bos)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def token_text(token: Any) -> str | None:
    """A token of tokenizer_config.json is a string or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TemplateError(f"{file.name} is not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _templates(folder: Path, config: dict[str, Any]) -> tuple[dict[str, str], str]:
    """(templates by name, the file of the first). As in transformers, template files win over tokenizer_config.json;
    the file of old processors comes last."""
    named: dict[str, str] = {}
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if (main := folder / "chat_template.jinja").is_file():
        files.insert(0, main)
    for file in files:
        named["default" if file == main else file.stem] = file.read_text(encoding="utf-8")
    if named:
        return named, files[0].name
    for origin, value in (
        ("tokenizer_config.json", config.get("chat_template")),
        ("chat_template.json", _json(folder / "chat_template.json").get("chat_template")),
    ):
        if isinstance(value, str) and value:
            return {"default": value}, origin
        if isinstance(value, list):
            value = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)}
        if isinstance(value, dict) and value:
            return value, origin
    return {}, ""
