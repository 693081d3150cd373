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


@cache
def formats() -> dict[str, SlotTemplate]:
    """All built-in formats by name, in the order of the file."""
    data = tomllib.loads((Path(__file__).parent / "builtin.toml").read_text(encoding="utf-8"))
    return {name: _format(name, entry, data) for name, entry in data.items()}


def _format(name: str, entry: dict[str, Any], data: dict[str, Any]) -> SlotTemplate:
    """`like` takes the slots of another format, which this one then changes; its names are its own."""
    values = dict(entry)
    while like := values.pop("like", None):
        own = ("aliases", "model_types", "hints")
        values = {key: value for key, value in data[like].items() if key not in own} | values
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
    for name in files.names:
        for template in formats().values():
            if any(normal_name(hint) in normal_name(name.rsplit("/", 1)[-1]) for hint in template.hints):
                return template, f"the model's name {name.rsplit('/', 1)[-1]!r}"
    types = [files.model_type.lower(), *(name.lower() for name in files.architectures)]
    for template in formats().values():
        for model_type in template.model_types:
            if model_type in types:
                return template, f"model type {model_type!r}"
    return None
