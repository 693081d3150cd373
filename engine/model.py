"""Loads a Hugging Face decoder and runs it: token ids of a batch -> hidden states -> logits of the rows that count.

The only importer of modelling code. Any decoder works whose attention goes through transformers' attention interface
and passes keywords on; a probe at load tells, and refuses the others by name. Knows nothing of pages and sampling.

    T tokens, H hidden size, S selected rows, V vocabulary
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import fuse, legacy, linear, quantize
from engine.attention import base
from engine.attention.base import LayerSpec, PagedBatch, Probe, UnsupportedAttention
from engine.messages import EngineConfig
from engine.native import Kernels, NativeOps
from engine.ops import TorchOps

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelLoadError(ValueError):
    """The model cannot be served: one line that names the cause, and no path but the model's own name."""


class Model:
    """A decoder on its device. `specs[i]` is what attention layer i asks for."""

    def __init__(self, name: str, hf: nn.Module, max_model_len: int) -> None:
        self.name, self.hf = name, hf
        self.config = hf.config.get_text_config()
        self.max_model_len = max_model_len
        self._head = _Head(hf)
        self.vocab_size: int = hf.get_output_embeddings().weight.shape[0]
        self._run_body: Callable[[Tensor, Tensor, PagedBatch], Tensor] = self._run_hf_body
        self.specs: list[LayerSpec] = self._probe()

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
            self._run_body = body
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

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    def hidden(self, token_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """token_ids, positions int64 [T] -> [T, H] after the last norm"""
        return self._run_body(token_ids, positions, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] -> float32 [S, V], with the scaling and capping of the model's own head"""
        return self._head(hidden[None])[0].float()

    def _run_hf_body(self, token_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        out = self.hf.base_model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, paged_batch=batch
        )
        return out.last_hidden_state[0]

    def _probe(self) -> list[LayerSpec]:
        """Three tokens through the model: every layer must call the attention with the batch object."""
        probe = Probe()
        ids = torch.arange(3, device=self.device) % self.vocab_size
        try:
            with torch.inference_mode():
                self.logits(self.hidden(ids, torch.arange(3, device=self.device), probe))
        except UnsupportedAttention as error:
            raise self._refuse(str(error)) from error
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
            raise self._refuse(f"its forward fails: {_first_line(error)}") from error
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
        return [probe.specs[layer] for layer in range(self.config.num_hidden_layers)]

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
        self._model = copy.copy(hf)
        self._model._modules = {**hf._modules, hf.base_model_prefix: self._handover}

    def __call__(self, hidden: Tensor) -> Tensor:
        self._handover.states = hidden
        logits: Tensor = self._model(use_cache=False).logits
        return logits

    def speed_up(self, make: linear.Make) -> None:
        """Put the projection to the vocabulary in the fastest format."""
        for name, child in self._model._modules.items():
            if type(child) is nn.Linear:
                self._model._modules[name] = linear.LinearModule(make(child.weight, child.bias))


def load(config: EngineConfig, device: torch.device) -> Model:
    """Raises ModelLoadError."""
    folder = Path(config.model_path)
    if not folder.is_dir():
        raise ModelLoadError(f"the model folder {folder.name!r} does not exist")
    base.register()
    hf_config = _read_config(config, folder)
    dtype = _choose_dtype(config.dtype, hf_config, device)
    max_model_len = _max_model_len(config.max_model_len, hf_config.get_text_config())
    hf = _load_weights(config, folder, hf_config, dtype, device)
    hf.requires_grad_(False)
    _pin_rope(hf, max_model_len)
    return Model(folder.name, hf, max_model_len)


def _read_config(config: EngineConfig, folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        written = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ModelLoadError(f"{folder.name!r} has no config.json") from None
    except ValueError as error:
        raise ModelLoadError(f"config.json of {folder.name!r} is not JSON: {error}") from error
    values = _merge(written, config.hf_overrides)
    try:
        values = legacy.native_config(values, folder)
    except ValueError as error:
        model_type = values["model_type"]
        raise ModelLoadError(f"the model type {model_type!r} of {folder.name!r} is not supported: {error}") from error
    if "auto_map" in values and config.trust_remote_code:
        return AutoConfig.from_pretrained(folder, trust_remote_code=True, **config.hf_overrides)
    model_type = values.pop("model_type", None)
    try:
        return AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        hint = "; it brings code of its own, which TRUST_REMOTE_CODE=1 would run" if "auto_map" in values else ""
        raise ModelLoadError(
            f"the model type {model_type!r} of {folder.name!r} is not supported{hint}: {_first_line(error)}"
        ) from error


def _merge(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _choose_dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    """auto: what the checkpoint holds on a GPU; on a CPU bfloat16 only if it multiplies that in hardware."""
    if name != "auto":
        if name not in _DTYPES:
            raise ModelLoadError(f"the dtype {name!r} is not known; there are auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if linear.has_fast_bf16() else torch.float32
    written = hf_config.get_text_config().dtype or hf_config.dtype
    return written if written in (torch.bfloat16, torch.float16) else torch.bfloat16


def _max_model_len(wanted: int | None, config: Any) -> int:
    """The wanted context, or all that the position embeddings of the model can tell apart."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if limit and rope.get("rope_type") in ("yarn", "linear") and (factor := rope.get("factor")):
        limit = max(limit, int(rope.get("original_max_position_embeddings", limit) * factor))
    if limit and rope.get("rope_type") == "dynamic":
        # Beyond the trained length its angles depend on the longest sequence of the batch.
        limit = rope.get("original_max_position_embeddings") or limit
    if wanted is None:
        if not limit:
            raise ModelLoadError("the config does not tell the model's context; set MAX_MODEL_LEN")
        return int(limit)
    if limit and wanted > limit:
        raise ModelLoadError(f"MAX_MODEL_LEN={wanted} is more than the {limit} positions of the model")
    return wanted


def _load_weights(config: EngineConfig, folder: Path, hf_config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.utils import is_accelerate_available
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    name, options = folder.name, dict(trust_remote_code=config.trust_remote_code)
    try:
        if config.load_format == "dummy":
            hf = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation=base.IMPLEMENTATION, **options
            )
            return hf.eval().to(device)
        if device.type != "cpu" and is_accelerate_available():
            options["device_map"] = {"": device}
        files = _weight_files(config.load_format, folder)
        weights = legacy.native_weights(hf_config, folder, **files)
        loader = AutoModelForCausalLM if weights is None else MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
        hf, info = loader.from_pretrained(
            folder if weights is None else None,
            config=hf_config,
            dtype=dtype,
            attn_implementation=base.IMPLEMENTATION,
            local_files_only=True,
            output_loading_info=True,
            **(files if weights is None else {"state_dict": weights}),
            **options,
        )
    except ModelLoadError:
        raise
    except Exception as error:  # whatever is wrong with the files, it is the user's to mend: one line, with the cause
        text = _first_line(error).replace(str(folder), name)
        raise ModelLoadError(f"cannot load the weights of {name!r}: {text}") from error
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            some = ", ".join(sorted(str(key) for key in info[what])[:3])
            raise ModelLoadError(f"the weights of {name!r} do not fit its config: {what.replace('_', ' ')} {some}")
    return hf.to(device)


def _weight_files(load_format: str, folder: Path) -> dict[str, Any]:
    """The choice of files as arguments of from_pretrained."""
    if load_format == "gguf" or (load_format == "auto" and not _has(folder, "*.safetensors", "*.bin")):
        files = sorted(folder.glob("*.gguf"))
        if files:
            return {"gguf_file": files[0].name}
    wanted = {
        "safetensors": ("*.safetensors",),
        "pt": ("*.bin",),
        "gguf": ("*.gguf",),
        "auto": ("*.safetensors", "*.bin", "*.gguf"),
    }
    if load_format not in wanted:
        raise ModelLoadError(f"LOAD_FORMAT={load_format} is not known; there are {', '.join(wanted)}, dummy")
    if not _has(folder, *wanted[load_format]):
        raise ModelLoadError(f"{folder.name!r} holds no weights ({', '.join(wanted[load_format])})")
    if load_format == "auto":
        return {}
    return {"use_safetensors": load_format == "safetensors"}  # torch's own files are read with weights_only


def _has(folder: Path, *patterns: str) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _pin_rope(hf: nn.Module, max_model_len: int) -> None:
    """Rotary angles that depend on the longest sequence at hand would depend on who shares the batch.

    "longrope" models have two sets of factors; which one is used is settled here by the longest sequence allowed.
    """
    for module in hf.modules():
        if getattr(module, "rope_type", None) == "longrope":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](
                module.config, module.inv_freq.device, seq_len=max_model_len
            )
            module.inv_freq = frequencies
            module.rope_type = "default"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
