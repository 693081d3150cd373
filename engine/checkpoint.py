"""Reads a model folder: config.json and weights -> a Hugging Face model whose attention is the paged one.

The only importer of modelling code. Whatever is wrong with a folder is a ModelLoadError of one line.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import legacy, linear
from engine.attention import base
from engine.messages import EngineConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelLoadError(ValueError):
    """The model cannot be served: one line that names the cause, and no path but the model's own name."""


def read_config(config: EngineConfig, folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        written = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        if files := sorted(folder.glob("*.gguf")):  # such a file can bring its own
            return AutoConfig.from_pretrained(folder, gguf_file=files[0].name, **config.hf_overrides)
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
            f"the model type {model_type!r} of {folder.name!r} is not supported{hint}: {first_line(error)}"
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


def max_model_len(wanted: int | None, config: Any) -> int:
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


def read_weights(config: EngineConfig, folder: Path, hf_config: Any, device: torch.device) -> nn.Module:
    """-> the Hugging Face model on its device, in the dtype that the config asks for, with the paged attention."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
    from transformers.utils import is_accelerate_available
    from transformers.utils import logging as hf_logging

    dtype = _choose_dtype(config.dtype, hf_config, device)
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
            ignore_mismatched_sizes=True,  # told of below, by name
            **(files if weights is None else {"state_dict": weights}),
            **options,
        )
    except ModelLoadError:
        raise
    except KeyError as error:
        if error.args != (base.IMPLEMENTATION,):
            raise
        # Its class looks up its attention in a table of its own.
        reason = "its attention does not go through the attention interface"
        raise ModelLoadError(f"the model type {hf_config.model_type!r} cannot be served: {reason}") from error
    except Exception as error:  # whatever is wrong with the files, it is the user's to mend: one line, with the cause
        text = first_line(error).replace(str(folder), name)
        raise ModelLoadError(f"cannot load the weights of {name!r}: {text}") from error
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            some = ", ".join(sorted(str(key) for key in info[what])[:3])
            raise ModelLoadError(f"the weights of {name!r} do not fit its config: {what.replace('_', ' ')} {some}")
    return hf if hf.device == device else hf.to(device)  # some quantized models must not be moved


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


def pin_rope(hf: nn.Module, max_model_len: int) -> None:
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


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
