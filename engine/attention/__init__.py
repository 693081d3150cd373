"""The attention backends by name. Each is imported only when it is asked for: their packages may be missing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, LayerSpec

_BACKENDS = {"cpu": "CpuBackend", "flash": "FlashBackend", "sdpa": "SdpaBackend", "varlen": "VarlenBackend"}
# What "auto" tries, best first.
_PREFERENCE = {"cpu": ("cpu", "sdpa"), "cuda": ("flash", "varlen", "sdpa")}


class BackendError(Exception):
    """No backend of that name, or it cannot run the model: one sentence."""


def choose(name: str, specs: Sequence[LayerSpec], device: torch.device, dtype: torch.dtype) -> type[AttentionBackend]:
    """The backend class to use: the named one, or under "auto" the first that accepts the model."""
    if name != "auto" and name not in _BACKENDS:
        raise BackendError(f"the attention backend {name!r} is not known; there are {', '.join(sorted(_BACKENDS))}")
    reasons = []
    for candidate in (name,) if name != "auto" else _PREFERENCE[device.type]:
        try:
            backend = getattr(importlib.import_module(f"engine.attention.{candidate}"), _BACKENDS[candidate])
        except ImportError as error:
            reasons.append(f"{candidate} needs the package {error.name}")
            continue
        if (reason := backend.refusal(specs, device, dtype)) is None:
            return backend
        reasons.append(f"{candidate} {reason}")
    raise BackendError(f"no attention backend can run this model: {'; '.join(reasons)}")
