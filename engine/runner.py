"""Runs plans on the device: plan -> batch -> forward -> logits -> tokens.

`launch` starts a step and `collect` waits for its results; what lies between may overlap on a GPU. Owns the model,
the KV pool and the per-sequence state of the sampler. Knows nothing of requests' ends, pages' owners or text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import adjust, attention, batch, kv, logprobs, model, native, sampler, threads
from engine.adjust import Adjustment
from engine.attention.base import Probe
from engine.batch import Batch
from engine.logprobs import Logprobs, Wanted
from engine.messages import EngineConfig, RequestError, TokenLogprobs
from engine.model import ModelLoadError
from engine.sampler import Sampling
from engine.scheduler import Part, Plan
from engine.sequence import Sampled, Sequence

# Rows of prompt logprobs whose logits are there at once: V float32 each.
_PROMPT_ROWS = 256


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


class SamplingState:
    """What is kept for a sequence between steps, as `seq.sampling_state`."""

    __slots__ = ("adjustment", "sampling", "wanted")

    def __init__(self, seq: Sequence) -> None:
        params = seq.params
        self.adjustment = Adjustment(seq)
        self.sampling = Sampling(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            sampler.stream_key(seq.seed, seq.request.choice),
        )
        self.wanted: Wanted | None = None
        if params.logprobs is not None or params.logprob_token_ids:
            self.wanted = Wanted(params.logprobs or 0, params.logprob_token_ids)


@dataclass(slots=True)
class Pending:
    """A step that has been started; tensors may still be computed. S rows: the parts that sample, in order."""

    plan: Plan
    token_ids: Tensor  # int64 [S]
    best: Tensor  # float32 [S]: the largest logit, not finite where nothing can be drawn
    failed: dict[int, RequestError]  # by row
    logprobs: dict[int, int]  # row -> its entry of `entries`
    entries: Logprobs | None
    prompt_logprobs: dict[Sequence, list[TokenLogprobs | None]]


class Runner:
    """Raises ModelLoadError from the constructor if the model cannot be served."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] = lambda _: None) -> None:
        load_s: dict[str, float] = {}

        def phase(name: str, since: float) -> float:
            load_s[name] = (now := time.perf_counter()) - since
            return now

        begin = time.perf_counter()
        device = _device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads or threads.default_count())
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
            raise ModelLoadError(
                f"the attention backend {backend.name} needs pages of a multiple of "
                f"{backend.page_multiple} tokens, not {page_size}"
            )
        self.backend = backend()
        page_bytes = kv.page_bytes(self.model.specs, page_size, self.model.dtype)
        num_pages = kv.num_pages(
            config, page_size, page_bytes, self.model.max_model_len, device, self._activation_bytes(config)
        )
        self.pool = kv.KVPool(self.model.specs, num_pages, page_size, device, self.model.dtype, backend.tokens_first)
        begin = phase("kv_pool", begin)
        with torch.inference_mode():
            progress("preparing the layers")  # the first time on a machine this compiles the kernels
            kernels = native.kernels(self.model.dtype) if device.type == "cpu" else None
            self.model.speed_up(kernels, config.quantization)
        phase("speed_up", begin)
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
    def _activation_bytes(self, config: EngineConfig) -> int:
        """What a forward of the largest step takes beside weights and pages (CUDA; a CPU needs no such care)."""
        if self.model.device.type != "cuda":
            return 0
        device = self.model.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        token_ids = torch.zeros(config.max_num_batched_tokens, dtype=torch.int64, device=device)
        hidden = self.model.hidden(token_ids, token_ids, Probe())
        self.model.logits(hidden[: max(config.max_num_seqs, _PROMPT_ROWS)])
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        return peak - before

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        step = batch.build(plan, self.backend, self.pool)
        hidden = self.model.hidden(step.token_ids, step.positions, step)
        prompt_logprobs = self._prompt_logprobs(plan, step, hidden)
        seqs = [part.seq for part in plan.parts if part.samples]
        if not seqs:
            none = torch.empty(0, dtype=torch.int64)
            return Pending(plan, none, none, {}, {}, None, prompt_logprobs)
        states = [_state(seq) for seq in seqs]
        logits = self.model.logits(hidden[step.logits_at])
        reported = [row for row, state in enumerate(states) if state.wanted is not None]
        adjusted = logits.clone() if reported and any(state.adjustment.active for state in states) else logits
        failed = adjust.apply(adjusted, [state.adjustment for state in states])
        token_ids, best = sampler.sample(
            adjusted, [state.sampling for state in states], [seq.num_output for seq in seqs]
        )
        entries = None
        if reported:
            entries = logprobs.compute(logits[reported], token_ids[reported], [states[row].wanted for row in reported])
        return Pending(
            plan, token_ids, best, failed, {row: i for i, row in enumerate(reported)}, entries, prompt_logprobs
        )

    def collect(self, pending: Pending) -> list[Sampled]:
        """One result a part that samples or has prompt logprobs, in the order of the plan."""
        token_ids, best = pending.token_ids.tolist(), pending.best.tolist()
        entries = pending.entries.to_list() if pending.entries is not None else []
        results, row = [], 0
        for part in pending.plan.parts:
            prompt = pending.prompt_logprobs.get(part.seq) if pending.prompt_logprobs else None
            if not part.samples:
                if prompt is not None:
                    results.append(Sampled(part.seq, [], None, prompt))
                continue
            error = pending.failed.get(row) or _why_not(part.seq, best[row])
            if error is not None:
                results.append(Sampled(part.seq, [], None, prompt, error))
            else:
                entry = pending.logprobs.get(row)
                results.append(Sampled(part.seq, [token_ids[row]], None if entry is None else [entries[entry]], prompt))
            row += 1
        return results

    def forget(self, seq: Sequence) -> None:
        seq.sampling_state = None

    def _prompt_logprobs(self, plan: Plan, step: Batch, hidden: Tensor) -> dict[Sequence, list[TokenLogprobs | None]]:
        """hidden [T, H] -> of each part that wants them: entries of the prompt tokens start + 1 .. start + count."""
        results: dict[Sequence, list[TokenLogprobs | None]] = {}
        for part, first_row in zip(plan.parts, step.first_row.tolist(), strict=True):
            if not part.seq.wants_prompt_logprobs or part.start >= part.seq.num_prompt:
                continue
            entries: list[TokenLogprobs | None] = [None] if part.start == 0 else []
            entries += self._prompt_entries(part, hidden[first_row : first_row + part.count])
            results[part.seq] = entries
        return results

    def _prompt_entries(self, part: Part, hidden: Tensor) -> list[TokenLogprobs]:
        """hidden [count, H] of the part; in slices, so that the logits of a long prompt are never there at once."""
        seq = part.seq
        end = min(part.start + part.count, seq.num_prompt - 1)  # the last prompt token has no successor to score
        wanted = Wanted(seq.params.prompt_logprobs or 0, seq.params.logprob_token_ids)
        entries: list[TokenLogprobs] = []
        for start in range(part.start, end, _PROMPT_ROWS):
            stop = min(start + _PROMPT_ROWS, end)
            actual = torch.tensor(seq.token_ids[start + 1 : stop + 1], device=hidden.device)
            logits = self.model.logits(hidden[start - part.start : stop - part.start])
            entries += logprobs.compute(logits, actual, [wanted] * len(actual)).to_list()
        return entries


def _why_not(seq: Sequence, best: float) -> RequestError | None:
    """Why nothing can be drawn from a row with this largest logit; None if something can."""
    if math.isfinite(best):
        return None
    params = seq.params
    if best == -math.inf and (seq.grammar is not None or params.allowed_token_ids or params.bad_words):
        text = "The request's constraint, allowed_token_ids and bad_words exclude each other: no token is left to draw."
        return RequestError("nothing_allowed", text)
    return RequestError("internal_error", "No token can be drawn: the model's logits are not finite.")


def _state(seq: Sequence) -> SamplingState:
    if seq.sampling_state is None:
        seq.sampling_state = SamplingState(seq)
    state: SamplingState = seq.sampling_state
    return state


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError("DEVICE=cuda, but torch sees no CUDA device")
    return torch.device(name)
