"""Runs plans on the device: plan -> batch -> forward -> logits -> tokens.

`launch` starts a step and `collect` waits for its results; what lies between may overlap on a GPU. Owns the model,
the KV pool and the per-sequence state of the sampler. Knows nothing of requests' ends, pages' owners or text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import attention, batch, kv, model
from engine.messages import EngineConfig
from engine.model import ModelLoadError
from engine.scheduler import Plan
from engine.sequence import Sampled, Sequence


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    num_pages: int
    page_size: int
    vocab_size: int
    max_model_len: int
    device: str
    dtype: str
    attention_backend: str
    load_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Pending:
    """A step that has been started."""

    plan: Plan
    token_ids: Tensor  # int64 [S]


class Runner:
    """Raises ModelLoadError from the constructor if the model cannot be served."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> None:
        load_s: dict[str, float] = {}

        def phase(name: str, since: float) -> float:
            load_s[name] = (now := time.perf_counter()) - since
            return now

        begin = time.perf_counter()
        device = _device(config.device)
        _set_threads(config, device)
        progress("loading the weights")
        self.model = model.load(config, device)
        begin = phase("weights", begin)
        progress("making room for keys and values")
        try:
            backend = attention.choose(config.attention_backend, self.model.specs, device, self.model.dtype)
        except attention.BackendError as error:
            raise ModelLoadError(str(error)) from error
        page_size = config.page_size or backend.default_page_size
        if page_size % backend.page_multiple:
            raise ModelLoadError(f"the attention backend {backend.name} needs pages of a multiple of "
                                 f"{backend.page_multiple} tokens, not {page_size}")
        self.backend = backend()
        free = kv.free_bytes(device, config.gpu_memory_utilization)
        page_bytes = kv.page_bytes(self.model.specs, page_size, self.model.dtype)
        num_pages = kv.num_pages(config, page_size, page_bytes, self.model.max_model_len, free)
        self.pool = kv.KVPool(self.model.specs, num_pages, page_size, device, self.model.dtype)
        phase("kv_pool", begin)
        self.info = RunnerInfo(
            num_pages=num_pages,
            page_size=page_size,
            vocab_size=self.model.vocab_size,
            max_model_len=self.model.max_model_len,
            device=str(device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            attention_backend=backend.name,
            load_s=load_s,
        )

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        step = batch.build(plan, self.backend, self.pool)
        hidden = self.model.hidden(step.token_ids, step.positions, step)
        logits = self.model.logits(hidden[step.logits_at])
        return Pending(plan, logits.argmax(-1))

    def collect(self, pending: Pending) -> list[Sampled]:
        sampling = [part for part in pending.plan.parts if part.samples]
        return [
            Sampled(part.seq, [token_id]) for part, token_id in zip(sampling, pending.token_ids.tolist(), strict=True)
        ]

    def forget(self, seq: Sequence) -> None:
        seq.sampling_state = None


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError("DEVICE=cuda, but torch sees no CUDA device")
    return torch.device(name)


def _set_threads(config: EngineConfig, device: torch.device) -> None:
    import os

    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
