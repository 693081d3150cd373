"""The built-in formats of builtin.toml, and which of them a name or a model stands for."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from templates.model_files import ModelFiles
from templates.slots import SlotTemplate

FALLBACK = "chatml"
_ABOUT_MODELS = ("aliases", "model_types", "vocab_sizes", "needs", "hints")


@cache
def formats() -> dict[str, SlotTemplate]:
    """All built-in formats by name, in the order of the file."""
    data = tomllib.loads((Path(__file__).parent / "builtin.toml").read_text(encoding="utf-8"))
    return {name: _format(name, entry, data) for name, entry in data.items()}


def _format(name: str, entry: dict[str, Any], data: dict[str, Any]) -> SlotTemplate:
    """`like` takes the slots of another format, which this one then changes; its names are its own."""
    values = dict(entry)
    while like := values.pop("like", None):
        values = {key: value for key, value in data[like].items() if key not in _ABOUT_MODELS} | values
    known = {field.name for field in fields(SlotTemplate)}
    if unknown := values.keys() - known:
        raise ValueError(f"builtin.toml: {name} has unknown fields: {', '.join(sorted(unknown))}")
    slots: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return SlotTemplate(name, **slots)


def normal_name(name: str) -> str:
    """Names differ in case and punctuation only: "Llama-2", "llama_2", "llama2"."""
    return re.sub(r"[\s_./-]+", "", name.lower())


@cache
def _by_name() -> dict[str, str]:
    names: dict[str, str] = {}
    for name, template in formats().items():
        for alias in (*template.aliases, name):
            names[normal_name(alias)] = name
    return names


def known_names() -> list[str]:
    return sorted({name for name, template in formats().items()} | {a for t in formats().values() for a in t.aliases})


def by_name(name: str) -> SlotTemplate | None:
    found = _by_name().get(normal_name(name))
    return formats()[found] if found else None


def for_model(files: ModelFiles) -> tuple[SlotTemplate, str] | None:
    """(format, why) by the model's name, else by its type; None if neither is known."""
    usable = [template for template in formats().values() if all(map(files.is_token, template.needs))]
    return _by_hint(usable, files) or _by_type(usable, files)


def _by_hint(usable: list[SlotTemplate], files: ModelFiles) -> tuple[SlotTemplate, str] | None:
    """The longest hint that a name of the model contains."""
    for name in files.names:
        matches = [
            (len(normal_name(hint)), template)
            for template in usable
            for hint in template.hints
            if normal_name(hint) in normal_name(name)
        ]
        if matches:
            return max(matches, key=lambda match: match[0])[1], f"the model's name is {name!r}"
    return None


def _by_type(usable: list[SlotTemplate], files: ModelFiles) -> tuple[SlotTemplate, str] | None:
    for model_type in (files.model_type.lower(), *(name.lower() for name in files.architectures)):
        of_type = [template for template in usable if model_type in template.model_types]
        if of_type:
            by_size = [template for template in of_type if files.vocab_size in template.vocab_sizes]
            general = [template for template in of_type if not template.vocab_sizes]
            return (by_size or general or of_type)[0], f"its model type is {model_type!r}"
    return None
