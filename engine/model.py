"""Runs a Hugging Face decoder: token ids of a batch -> hidden states -> logits of the rows that count.

Any decoder works whose attention goes through transformers' attention interface
and passes keywords on; a probe at load tells, and refuses the others by name. Knows nothing of pages and sampling.

    T tokens, H hidden size, S selected rows, V vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import checkpoint, fuse, linear, quantize
from engine.attention import base
from engine.attention.base import LayerSpec, PagedBatch, Probe, UnsupportedAttention
from engine.checkpoint import ModelLoadError
from engine.messages import EngineConfig
from engine.native import Kernels, NativeOps
from engine.ops import TorchOps


class Model:
    """A decoder on its device. `specs[i]` is what attention layer i asks for."""

    def __init__(self, name: str, hf: nn.Module, max_model_len: int) -> None:
        self.name, self.hf = name, hf
        self.config = hf.config.get_text_config()
        self.max_model_len = max_model_len
        self._head = _Head(hf)
        self.vocab_size: int = hf.get_output_embeddings().weight.shape[0]
        self.body: Callable[[Tensor, Tensor, PagedBatch], Tensor] = self._run_hf_body
        self.specs, self.dtype = self._probe()

    def speed_up(self, kernels: Kernels | None, quantization: str | None) -> None:
        """Swap what can be swapped for faster parts that compute the same. Raises ModelLoadError.

        `kernels`: of this CPU, if there are any. Quantization changes the weights first, the parts after that.
        """
        if quantization is not None:
            self._check_quantization(kernels, quantization)
        make = linear.maker(self.device, self.dtype, kernels, quantization)
        ops = TorchOps() if kernels is None else NativeOps(kernels)
        body = fuse.fuse(self.hf.base_model, self.specs, self.max_model_len, ops, make, quantization)
        if body is not None:
            self.body = body
        elif self.device.type == "cpu":
            if quantization is not None:
                quantize.round_weights(self.hf.base_model, quantization)
            linear.replace_all(self.hf.base_model, make)
        self._head.speed_up(linear.maker(self.device, self.dtype, kernels, "int8" if quantization else None))

    def _check_quantization(self, kernels: Kernels | None, quantization: str) -> None:
        reason = None
        if quantization not in quantize.KINDS:
            reason = f"it is not known; there are {', '.join(quantize.KINDS)}"
        elif self.device.type != "cpu":
            reason = "it is for CPUs"
        elif kernels is None:
            reason = "it needs a C++ compiler (c++, g++ or clang++) on this machine"
        else:
            reason = quantize.refusal(self.hf)
        if reason is not None:
            raise ModelLoadError(f"QUANTIZATION={quantization} is not possible for {self.name!r}: {reason}")

    @property
    def device(self) -> torch.device:
        return self.hf.device

    def hidden(self, token_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """token_ids, positions int64 [T] -> [T, H] after the last norm"""
        return self.body(token_ids, positions, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] -> float32 [S, V], with the scaling and capping of the model's own head"""
        return self._head(hidden[None])[0].float()

    def _run_hf_body(self, token_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        out = self.hf.base_model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, paged_batch=batch
        )
        return out.last_hidden_state[0]

    def _probe(self) -> tuple[list[LayerSpec], torch.dtype]:
        """Three tokens through the model: every layer must call the attention with the batch object.

        -> what the layers ask for, and the dtype of their keys
        """
        probe = Probe()
        ids = torch.arange(3, device=self.device) % self.vocab_size
        try:
            with torch.inference_mode():
                self.logits(self.hidden(ids, torch.arange(3, device=self.device), probe))
        except UnsupportedAttention as error:
            raise self._refuse(str(error)) from error
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
            raise self._refuse(f"its forward fails: {checkpoint.first_line(error)}") from error
        missing = set(range(self.config.num_hidden_layers)) - set(probe.specs)
        if missing:
            raise self._refuse(
                f"the attention of {len(missing)} of its {self.config.num_hidden_layers} layers does "
                "not go through the attention interface"
            )
        for layer, kind in enumerate(getattr(self.config, "layer_types", None) or ()):
            windowed = probe.specs[layer].window is not None
            if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention") != windowed:
                raise self._refuse(f"its layer {layer} is of the type {kind}")
        assert probe.dtype is not None
        return [probe.specs[layer] for layer in range(self.config.num_hidden_layers)], probe.dtype

    def _refuse(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"the architecture {type(self.hf).__name__} cannot be served: {reason}")


class _BodyOutput:
    """Final states in place of whatever kind of output a body returns; all its other fields are None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Handover(nn.Module):
    """Takes the place of a model's body when only its head is to run: hands the given states on."""

    states: Tensor

    def forward(self, *_: Any, **__: Any) -> _BodyOutput:
        return _BodyOutput(self.states)

    @property
    def decoder(self) -> nn.Module:  # OPT's head calls the inner decoder
        return self


class _Head:
    """What the forward of the whole model does after the body, and nothing else."""

    def __init__(self, hf: nn.Module) -> None:
        self._handover = _Handover()
        self._projection: linear.LinearModule | None = None  # all that there is, if set
        self._model = copy.copy(hf)
        self._model._modules = {**hf._modules, hf.base_model_prefix: self._handover}

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._projection is not None:
            return self._projection(hidden)
        self._handover.states = hidden
        logits: Tensor = self._model(use_cache=False).logits
        return logits

    def speed_up(self, make: linear.Make) -> None:
        """Put the projection to the vocabulary in the fastest format; call it alone where there is nothing else."""
        for name, child in self._model._modules.items():
            if type(child) is nn.Linear:
                projection = linear.LinearModule(make(child.weight, child.bias))
                self._model._modules[name] = projection
                sample = 10 * torch.randn(1, 2, child.in_features).to(child.weight)
                with torch.inference_mode():
                    if torch.equal(self(sample), projection(sample)):
                        self._projection = projection
                        return


def load(config: EngineConfig, device: torch.device) -> Model:
    """Raises ModelLoadError."""
    folder = Path(config.model_path)
    if not folder.is_dir():
        raise ModelLoadError(f"the model folder {folder.name!r} does not exist")
    base.register()
    hf_config = checkpoint.read_config(config, folder)
    max_model_len = checkpoint.max_model_len(config.max_model_len, hf_config.get_text_config())
    hf = checkpoint.read_weights(config, folder, hf_config, device)
    hf.requires_grad_(False)
    checkpoint.pin_rope(hf, max_model_len)
    return Model(folder.name, hf, max_model_len)
