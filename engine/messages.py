"""What crosses the border between the worker process and the engine process.

Plain frozen dataclasses, pickled over a private local socket. Importing this module imports nothing
but the standard library, so both sides (and tests) can use it freely.

    worker  --- Request, Abort, GetStats, ... --->  engine      (commands)
    engine  --- StepOutput, Stats, ...        --->  worker      (one StepOutput a step)

Every Request is answered by SequenceOutputs of which exactly one, the last, has `finish` set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token id, or the grammar is complete
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client asked for it
    ERROR = "error"  # this request failed; SequenceOutput.error says why


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs to know. Built by the worker from its settings."""

    model_path: str  # local folder with config.json and weights
    device: str = "auto"  # "auto" | "cpu" | "cuda"
    dtype: str = "auto"  # "auto" | "float32" | "bfloat16" | "float16"
    quantization: str | None = None  # None (as the checkpoint says) | "int8" | "int4"
    max_model_len: int | None = None  # tokens of context; None = from the model's config
    max_num_seqs: int = 256  # sequences that may share a step
    max_num_batched_tokens: int = 2048  # token budget of a step, prefill and decode together
    max_num_queued: int = 1024  # requests waiting for admission before new ones are refused
    gpu_memory_utilization: float = 0.90  # share of the device's memory for weights + KV pool
    kv_cache_memory_bytes: int | None = None  # size of the KV pool; wins over gpu_memory_utilization
    num_pages: int | None = None  # size of the KV pool in pages; wins over both
    page_size: int | None = None  # tokens a page; None = what the attention backend prefers
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"  # "auto" | "sdpa" | "flash" | "varlen" | ...
    enforce_eager: bool = False  # no CUDA graphs
    num_threads: int | None = None  # CPU threads of the forward pass; None = chosen from the cores
    max_logprobs: int = 20
    load_format: str = "auto"  # "auto" | "safetensors" | "pt" | "gguf" | "dummy"
    trust_remote_code: bool = False
    seed: int = 0  # seeds requests that bring none (drawn from, so that they differ)
    tokenizer_path: str | None = None  # folder of tokenizer.json for grammars; None = model_path
    hf_overrides: dict[str, Any] = field(default_factory=dict)  # written over config.json's keys
    output_interval_s: float = 0.0  # least time between messages with tokens; first tokens and ends do not wait


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the output text. Checked in the worker by `engine.grammar.check`, run in the engine."""

    kind: str  # "json_schema" | "json_object" | "regex" | "choice" | "lark"
    source: str  # the schema as JSON, the pattern, the choices as a JSON list, the lark grammar
    # The grammar applies only after this token sequence has been generated (end of reasoning); () = at once.
    start_after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Ranges are validated by the worker; ids are within the vocabulary.

    Order of application: penalties -> logit_bias -> masks (allowed ids, bad words, min_tokens, grammar)
    -> temperature -> top_k -> top_p -> min_p -> draw. `logprobs` are of the raw distribution, before all that.
    """

    max_tokens: int  # >= 0; 0 = only compute the prompt (prompt_logprobs), nothing is generated
    temperature: float = 1.0  # 0.0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None = the engine draws one
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    repetition_penalty: float = 1.0  # over prompt and output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is masked
    min_tokens: int = 0  # no stop id before this many output tokens
    # All ids that end the sequence, the model's eos ids included (left out by the worker under ignore_eos).
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # None = none; N = the sampled token's and the top N; -1 = the whole vocabulary
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # further ids whose logprob is wanted at every step


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. n choices are n Requests: the prefix cache shares their prompt."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    choice: int = 0  # enters the random numbers beside the seed, so that choices of one seed differ
    priority: int = 0  # lower first
    cache_salt: str = ""  # only requests with the same salt share cached pages
    grammar: GrammarSpec | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position. `token_ids[0]` is the sampled (or, for prompts, the actual) token; the rest are the
    top N in descending order, then `logprob_token_ids`. The sampled one may occur again among the top N."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural log; may be -inf
    rank: int  # of the sampled token, 1 = most likely


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why a single request ended with FinishReason.ERROR."""

    # "queue_full" | "prompt_too_long" | "invalid_request" | "grammar_failed" | "nothing_allowed" | "duplicate_id"
    # | "internal_error" | "engine_dead"
    code: str
    message: str  # one sentence for the client: no path, no traceback
    retry_after_s: float | None = None  # for queue_full: an estimate from queue length and throughput


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step did for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()  # new tokens, the stop token included
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one entry a new token
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, with the first output; [0] is None
    cached_tokens: int | None = None  # prompt tokens taken from the prefix cache; set on the first output
    finish: FinishReason | None = None
    stop_token_id: int | None = None  # the id that ended it, under STOP
    error: RequestError | None = None
    # With the first output of a request that ran: seconds from its arrival until it ran, and from there to now.
    queue_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What is new since the last message. Of a sequence, `tokens` come before what `outputs` has."""

    outputs: tuple[SequenceOutput, ...] = ()
    # (request id, token ids), a step each, of those that have new tokens and nothing else to say: most of them in most
    # steps, and far cheaper to pickle than a SequenceOutput each.
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Handover:
    """What the engine process is given at its start, once, over stdin. Its stdin stays open: EOF = parent gone."""

    config: EngineConfig
    socket_dir: str  # private to this user; removed by whichever of the two processes ends in order, or sees the end
    status_fd: int  # takes Progress lines, then EngineInfo or StartFailed, and EOF when the process is gone
    log_level: int

    @property
    def address(self) -> str:
        return f"ipc://{self.socket_dir}/engine"


@dataclass(frozen=True, slots=True)
class Progress:
    line: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    line: str  # one line for a person


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine says once it is ready."""

    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    device: str
    dtype: str
    attention_backend: str
    max_num_seqs: int
    load_s: dict[str, float] = field(default_factory=dict)  # seconds by phase: import, weights, probe, ...


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since start and gauges of this moment; the worker turns them into metrics."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0  # cached pages that nobody references count as free
    num_cached_pages: int = 0
    prompt_tokens: int = 0  # computed or taken from the cache
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    max_batch: int = 0  # the most sequences that shared one step
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    finished: dict[str, int] = field(default_factory=dict)  # by FinishReason value
    step_s: dict[str, float] = field(default_factory=dict)  # seconds by phase: plan, launch, collect, commit
    rss_bytes: int = 0  # resident memory of the engine process


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class GetStats:
    pass


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached pages that nobody references."""


Command = Request | Abort | GetStats | ResetPrefixCache
