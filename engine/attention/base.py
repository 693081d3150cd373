"""The seam between Hugging Face's attention modules and a paged attention backend.

`register()` makes "paged" an attention implementation of transformers. A model that is built with it calls
`paged_attention` in every layer with the keywords of its own forward, among them `paged_batch`: whatever object the
caller of the model passed. Two kinds exist: `Probe`, which only notes what the layers ask for, and
`engine.batch.Batch`, which holds a backend, the KV pool and the index tensors of the step.

    T tokens of the step, Hq query heads, Hkv key/value heads, D head size (of keys; values may have another)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from engine.batch import Batch
    from engine.kv import KVPool

IMPLEMENTATION = "paged"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer needs; a backend accepts all of it or refuses the model at load."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: bool = False  # one learned logit a head that takes part in the softmax and has no value


class PagedBatch(Protocol):
    def attend(
        self, layer: int, spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv] -> [T, Hq, Dv]"""


class AttentionBackend(ABC):
    """Writes new keys and values to their pages and attends over pages. One instance an engine."""

    name: str
    default_page_size: int = 16
    page_multiple: int = 1  # the page size must be a multiple of this
    tokens_first: bool = False  # the layout of the pool that the kernels want, see engine/kv.py

    @classmethod
    def refusal(cls, specs: Sequence[LayerSpec], device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this backend cannot run these layers on this device; None if it can."""
        return None

    @abstractmethod
    def prepare(self, batch: Batch, pool: KVPool) -> Any:
        """Index tensors that all layers of a step share. Called once a step, before the forward."""

    @abstractmethod
    def run(
        self,
        layer: int,
        spec: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        pool: KVPool,
        plan: Any,
    ) -> Tensor:
        """query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv], sinks [Hq] -> [T, Hq, Dv]"""


class Probe:
    """Stands in for a batch: notes the layers that call, and returns zeros of the right shape."""

    def __init__(self) -> None:
        self.specs: dict[int, LayerSpec] = {}
        self.dtype: torch.dtype | None = None  # of the keys: what the pool is to hold

    def attend(
        self, layer: int, spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        if layer in self.specs:
            raise UnsupportedAttention(f"layer {layer} attends more than once")
        self.specs[layer], self.dtype = spec, key.dtype
        return query.new_zeros(query.shape[0], spec.num_heads, spec.value_dim)


class UnsupportedAttention(Exception):
    """A layer asks for something that paged attention does not know."""


# Keywords of which any value but these asks for another attention than the causal one served here.
_NEUTRAL: dict[str, Any] = {
    "is_causal": (None, True),
    "position_bias": (None,),
    "attention_bias": (None,),
    "alibi": (None,),
    "head_mask": (None,),
}


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D], rotated already
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged_batch: PagedBatch | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention function of every layer: -> ([1, T, Hq, Dv], None)."""
    if paged_batch is None:
        raise UnsupportedAttention("the model does not pass keywords on to its attention")
    spec = getattr(module, "paged_spec", None)
    if spec is None:
        _check(module, attention_mask, keywords)
        spec = LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux is not None,
        )
        module.paged_spec = spec
    out = paged_batch.attend(
        module.layer_idx, spec, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), s_aux
    )
    return out.unsqueeze(0), None


def _check(module: nn.Module, attention_mask: Tensor | None, keywords: dict[str, Any]) -> None:
    if not isinstance(getattr(module, "layer_idx", None), int):
        raise UnsupportedAttention("its attention layers do not know their index")
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedAttention("its attention is not causal")
    if attention_mask is not None:
        raise UnsupportedAttention("it brings its own attention mask")
    for name, neutral in _NEUTRAL.items():
        if name in keywords and not any(keywords[name] is value for value in neutral):
            raise UnsupportedAttention(f"its attention uses {name}")


def register() -> None:
    """Idempotent. No mask function is registered under the name, so transformers builds no mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)
