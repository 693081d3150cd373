"""The settings of worker and gateway: the only readers of the environment.

Every setting is declared once, as a field with its variable names (those of RunPod's vLLM worker where they have a
meaning here), its type, default, group and help. `python -m worker.settings` prints .env.example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from engine.messages import EngineConfig
from worker import foreign_settings
from worker.environment import (
    describe,
    example,
    flag,
    hosts,
    integer,
    json_object,
    names,
    number,
    origins,
    read,
    read_one,
    secret_header,
    secret_text,
    setting,
    text,
    word,
)
from worker.errors import SettingsError

_MODEL, _ENGINE, _PROMPTS, _ANSWERS, _WORKER = "Model", "Engine", "Prompts", "Answers", "Worker"
_GATEWAY = "Gateway (the platform on your machine: make serve)"

# Sequences that may share a step, and tokens a step, where nothing is said: what a GPU and what a few cores can take.
_GPU_DEFAULTS, _CPU_DEFAULTS = (256, 2048), (64, 256)
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_BACKENDS = {"flash_attn": "flash", "torch_sdpa": "sdpa"}


@dataclass(frozen=True)
class Settings:
    # fmt: off
    model_name: str | None = setting(_MODEL, "MODEL_NAME", "MODEL_ID", "CHECKPOINT_PATH", of=text,
        help="Model to serve: a folder, or a name on the Hugging Face hub. Required by the worker; make serve "
             "takes a small demo model without it.")
    model_revision: str | None = setting(_MODEL, "MODEL_REVISION", of=text,
        help="Branch, tag or commit on the hub, for every file of the model.")
    tokenizer_name: str | None = setting(_MODEL, "TOKENIZER_NAME", "TOKENIZER", "TOKENIZER_PATH", of=text,
        help="Folder or hub name of the tokenizer. Empty: the model's.")
    tokenizer_revision: str | None = setting(_MODEL, "TOKENIZER_REVISION", of=text,
        help="Revision of the tokenizer alone. Empty: MODEL_REVISION.")
    hf_token: str | None = setting(_MODEL, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", of=secret_text, secret=True,
        help="Access token for gated and private models.")
    base_path: str = setting(_MODEL, "BASE_PATH", of=text, default="/runpod-volume",
        help="Volume that keeps downloads: huggingface-cache/hub below it, where the folder exists.")
    download_dir: str | None = setting(_MODEL, "DOWNLOAD_DIR", of=text,
        help="Folder for downloads; wins over BASE_PATH.")
    hf_hub_offline: bool = setting(_MODEL, "HF_HUB_OFFLINE", of=flag, default=False,
        help="Never ask the hub, take only what is on disk.")
    load_format: str = setting(_MODEL, "LOAD_FORMAT",
        of=word("auto", "safetensors", "pt", "gguf", "dummy"), default="auto",
        help="Format of the weights: auto, safetensors, pt, gguf, or dummy (random weights).")
    dtype: str = setting(_MODEL, "DTYPE",
        of=word("auto", "float32", "bfloat16", "float16", synonyms=_DTYPES), default="auto",
        help="Number format of weights and cache: auto (the checkpoint's; on a CPU the fastest it has), bfloat16, "
             "float16, float32.")
    quantization: str | None = setting(_MODEL, "QUANTIZATION", "QUANTIZE", of=word("int8", "int4"),
        help="int8 or int4 quantizes the weights while loading. Empty: as the checkpoint is.")
    trust_remote_code: bool = setting(_MODEL, "TRUST_REMOTE_CODE", of=flag, default=False,
        help="Allow code that comes with a checkpoint.")
    hf_overrides: Mapping[str, Any] = setting(_MODEL, "HF_OVERRIDES", of=json_object, default={},
        help="JSON object written over the keys of the model's config.json.")

    device: str = setting(_ENGINE, "DEVICE", of=word("auto", "cpu", "cuda"), default="auto",
        help="auto (a GPU where there is one), cpu or cuda.")
    max_model_len: int | None = setting(_ENGINE, "MAX_MODEL_LEN", "MAX_TOTAL_TOKENS", of=integer(1, unset=(-1, 0)),
        help="Context length in tokens, prompt and answer together. Empty: the model's.")
    max_num_seqs: int = setting(_ENGINE, "MAX_NUM_SEQS", of=integer(1, 4096, zero_unset=True), default=0,
        help="Sequences that may share a step. 0: 256 with a GPU, 64 without.")
    max_num_batched_tokens: int = setting(_ENGINE, "MAX_NUM_BATCHED_TOKENS", "MAX_BATCH_PREFILL_TOKENS",
        of=integer(1, zero_unset=True),
        help="Tokens a step may compute, prompts and answers together. 0: 2048 with a GPU, 256 without.")
    max_num_queued: int = setting(_ENGINE, "MAX_NUM_QUEUED_REQS",
        of=integer(1, 1_000_000, zero_unset=True), default=1024,
        help="Sequences that may wait for their first step; more are refused with status 429.")
    gpu_memory_utilization: float = setting(_ENGINE, "GPU_MEMORY_UTILIZATION",
        of=number(0, 1, above=True), default=0.90,
        help="Share of the GPU's memory for weights and KV cache.")
    kv_cache_memory_bytes: int | None = setting(_ENGINE, "KV_CACHE_MEMORY_BYTES", of=integer(1, zero_unset=True),
        help="Size of the KV cache in bytes; wins over GPU_MEMORY_UTILIZATION.")
    num_pages: int | None = setting(_ENGINE, "NUM_GPU_BLOCKS_OVERRIDE", of=integer(1, zero_unset=True),
        help="Size of the KV cache in pages; wins over both.")
    page_size: int | None = setting(_ENGINE, "BLOCK_SIZE", of=integer(1, 4096, zero_unset=True),
        help="Tokens a page. Empty: what the attention backend prefers.")
    enable_prefix_caching: bool = setting(_ENGINE, "ENABLE_PREFIX_CACHING", of=flag, default=True,
        help="Reuse the KV cache of prompts that begin alike.")
    attention_backend: str = setting(_ENGINE, "ATTENTION_BACKEND", "VLLM_ATTENTION_BACKEND",
        of=word("auto", "sdpa", "flash", "varlen", "triton", synonyms=_BACKENDS), default="auto",
        help="auto, sdpa, flash, varlen or triton; one that the device or model cannot use is refused at start.")
    enforce_eager: bool = setting(_ENGINE, "ENFORCE_EAGER", of=flag, default=False,
        help="No CUDA graphs.")
    num_threads: int | None = setting(_ENGINE, "NUM_THREADS", of=integer(1, 1024, zero_unset=True),
        help="CPU threads of the model. Empty: chosen from the cores.")
    max_logprobs: int = setting(_ENGINE, "MAX_LOGPROBS", of=integer(-1), default=20,
        help="Most alternatives a request may ask for with logprobs; -1 = no limit.")
    seed: int = setting(_ENGINE, "SEED", of=integer(-(2**63)), default=0,
        help="Seed for requests that bring none.")

    custom_chat_template: str | None = setting(_PROMPTS, "CUSTOM_CHAT_TEMPLATE", of=text,
        help="Chat template: Jinja text (\\n stands for a line break) or the path of a file.")
    model_template_type: str | None = setting(_PROMPTS, "MODEL_TEMPLATE_TYPE", of=text,
        help="Name of a built-in chat template. Not together with CUSTOM_CHAT_TEMPLATE.")
    default_chat_template_kwargs: Mapping[str, Any] = setting(_PROMPTS, "DEFAULT_CHAT_TEMPLATE_KWARGS",
        of=json_object, default={},
        help='JSON object of template variables for requests that do not set them, such as {"enable_thinking": '
             "false}.")
    trust_request_chat_template: bool = setting(_PROMPTS, "TRUST_REQUEST_CHAT_TEMPLATE", of=flag, default=False,
        help="Accept chat_template in requests (rendered in the sandbox all the same).")
    allow_control_tokens: bool = setting(_PROMPTS, "ALLOW_CONTROL_TOKENS", of=flag, default=False,
        help="Let text that users write become control tokens in chat: a user can then close a turn and open "
             "another.")
    exclude_tools_when_none: bool = setting(_PROMPTS, "EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", of=flag, default=False,
        help="Leave tools out of the prompt where tool_choice is none.")

    served_model_name: tuple[str, ...] = setting(_ANSWERS, "OPENAI_SERVED_MODEL_NAME_OVERRIDE", "SERVED_MODEL_NAME",
        of=names, default=(),
        help="Names under which the model is served, with commas between; answers carry the first. Empty: "
             "MODEL_NAME.")
    accept_any_model_name: bool = setting(_ANSWERS, "ACCEPT_ANY_MODEL_NAME", "VLLM_SKIP_MODEL_NAME_VALIDATION",
        of=flag, default=False,
        help="Answer whatever model a request names.")
    generation_config: str = setting(_ANSWERS, "GENERATION_CONFIG",
        of=word("auto", "none", synonyms={"vllm": "none"}), default="auto",
        help="auto takes sampling defaults from the model's generation_config.json; none (or vllm) takes the "
             "API's.")
    override_generation_config: Mapping[str, Any] = setting(_ANSWERS, "OVERRIDE_GENERATION_CONFIG",
        of=json_object, default={},
        help='JSON object written over generation_config.json, such as {"top_p": 0.9}.')
    default_temperature: float | None = setting(_ANSWERS, "DEFAULT_TEMPERATURE", of=number(0, 2),
        help="Temperature of requests that give none; wins over generation_config.json. Empty: the model's, else "
             "1.")
    response_role: str = setting(_ANSWERS, "RESPONSE_ROLE", "OPENAI_RESPONSE_ROLE", of=text, default="assistant",
        help="Role of the messages that answer.")
    tool_call_parser: str | None = setting(_ANSWERS, "TOOL_CALL_PARSER", of=text,
        help="Format of the model's tool calls. Empty: found from its chat template.")
    reasoning_parser: str | None = setting(_ANSWERS, "REASONING_PARSER", of=text,
        help="Format of the model's reasoning. Empty: found from its chat template.")
    return_tokens_as_token_ids: bool = setting(_ANSWERS, "RETURN_TOKENS_AS_TOKEN_IDS", of=flag, default=False,
        help="Write tokens in logprobs as token_id:123 for every request.")
    force_include_usage: bool = setting(_ANSWERS, "ENABLE_FORCE_INCLUDE_USAGE", of=flag, default=False,
        help="Send usage at the end of every stream, asked for or not.")

    max_concurrency: int = setting(_WORKER, "MAX_CONCURRENCY", of=integer(1, 100_000, zero_unset=True),
        help="Jobs taken at once. 0: 2 x MAX_NUM_SEQS + 2, so that a full burst is taken without a pause.")
    stream_interval_ms: int = setting(_WORKER, "STREAM_INTERVAL_MS", of=integer(0, 10_000), default=40,
        help="Least time between two deliveries of a stream, in milliseconds. The first token is sent at once.")
    keep_alive_s: float = setting(_WORKER, "KEEP_ALIVE_S", "SSE_KEEP_ALIVE_INTERVAL", of=number(0, 3600), default=15.0,
        help="A stream that has been silent this long gets a comment, so that proxies keep it open; 0 = never.")
    max_batch_size: int = setting(_WORKER, "DEFAULT_BATCH_SIZE", of=integer(1, 10_000, zero_unset=True), default=50,
        help='Old answer shape only ({"tokens": [...]}): most text deltas in one delivery.')
    min_batch_size: int = setting(_WORKER, "DEFAULT_MIN_BATCH_SIZE", "MIN_BATCH_SIZE",
        of=integer(1, 10_000, zero_unset=True), default=1,
        help="Old answer shape only: text deltas in the first delivery.")
    batch_size_growth_factor: float = setting(_WORKER, "DEFAULT_BATCH_SIZE_GROWTH_FACTOR", "BATCH_SIZE_GROWTH_FACTOR",
        of=number(1, 10_000), default=3.0,
        help="Old answer shape only: how much larger each delivery is than the one before.")
    log_requests: bool = setting(_WORKER, "ENABLE_LOG_REQUESTS", of=flag, default=False,
        help="Log each request's id and sampling parameters, and its prompt cut to MAX_LOG_LEN.")
    max_log_chars: int = setting(_WORKER, "MAX_LOG_LEN", of=integer(0), default=200,
        help="Characters of a prompt that a log line may show.")
    # fmt: on

    # Variables of other servers that are set and mean nothing here, to be named in one warning.
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str], *, has_gpu: bool | None = None) -> Settings:
        """Raises SettingsError. `has_gpu`: whether to take a GPU's defaults; None = look for one."""
        settings = read(cls, environ, ignored=foreign_settings.check(environ))
        if settings.custom_chat_template and settings.model_template_type:
            raise SettingsError("MODEL_TEMPLATE_TYPE and CUSTOM_CHAT_TEMPLATE are both set: set only one of them")
        if settings.min_batch_size > settings.max_batch_size:
            sizes = f"{settings.min_batch_size} is more than DEFAULT_BATCH_SIZE={settings.max_batch_size}"
            raise SettingsError(f"DEFAULT_MIN_BATCH_SIZE={sizes}")
        if has_gpu is None:
            has_gpu = Path("/dev/nvidiactl").exists()
        num_seqs, num_tokens = _GPU_DEFAULTS if has_gpu and settings.device != "cpu" else _CPU_DEFAULTS
        return settings._with_defaults(num_seqs, num_tokens)

    def _with_defaults(self, num_seqs: int, num_tokens: int) -> Settings:
        """The limits that depend on one another, filled in."""
        num_seqs = self.max_num_seqs or num_seqs
        return replace(
            self,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(num_tokens, num_seqs),
            max_concurrency=self.max_concurrency or 2 * num_seqs + 2,
        )

    def describe(self) -> list[str]:
        """NAME=value of what differs from the defaults, secrets masked: for the log at start."""
        return describe(self)

    @property
    def model(self) -> str:
        """MODEL_NAME; raises SettingsError where it is not set."""
        if not self.model_name:
            raise SettingsError("MODEL_NAME is not set: give a model's folder or its name on the hub")
        return self.model_name

    @property
    def served_names(self) -> tuple[str, ...]:
        """The ids of the model, the first of which answers carry. Never a path of this machine."""
        return self.served_model_name or (public_name(self.model),)


def public_name(model: str) -> str:
    """A model's name as clients see it: the hub name, or the last part of a folder's path."""
    cached = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", model)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return PurePath(model).name if model.startswith(("/", "./", "../", "~")) else model


@dataclass(frozen=True)
class GatewaySettings:
    # fmt: off
    host: str = setting(_GATEWAY, "HOST", of=text, default="127.0.0.1",
        help="Address to listen on.")
    port: int = setting(_GATEWAY, "PORT", "START_PORT", of=integer(0, 65535), default=8000,
        help="Port to listen on; 0 = any free one.")
    api_key: str | None = setting(_GATEWAY, "API_KEY", of=secret_header, secret=True,
        help="Key that clients must send as a bearer token. Empty: none is asked for.")
    cors_origins: tuple[str, ...] = setting(_GATEWAY, "CORS_ORIGINS", of=origins, default=(),
        help="Origins whose web pages may call this server, like http://localhost:5173, with commas between; "
             "* = any. Empty: only the server's own page.")
    allowed_hosts: tuple[str, ...] = setting(_GATEWAY, "ALLOWED_HOSTS", of=hosts, default=(),
        help="Host names, beside this machine's own, under which a server on a loopback address may be called (by a "
             "tunnel or proxy), with commas between; * = any.")
    max_queued_jobs: int = setting(_GATEWAY, "MAX_QUEUED_JOBS", of=integer(1), default=1000,
        help="Jobs that may wait for a worker before new ones are refused with 429.")
    execution_timeout_s: float = setting(_GATEWAY, "EXECUTION_TIMEOUT", of=number(1, 604800), default=600.0,
        help="Seconds a job may run, where it names no limit itself.")
    rate_limit: int = setting(_GATEWAY, "RATE_LIMIT", of=integer(0), default=0,
        help="Requests in any 10 seconds before new ones are refused with 429; 0 = no limit.")
    # fmt: on

    keep_alive_s: float = 15.0  # the worker's KEEP_ALIVE_S, for streams that have no output yet

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> GatewaySettings:
        """Raises SettingsError."""
        return read(cls, environ, keep_alive_s=read_one(Settings, "keep_alive_s", environ))


def engine_config(settings: Settings, model_dir: Path, tokenizer_dir: Path | None = None) -> EngineConfig:
    """What the engine process gets to know."""
    return EngineConfig(
        model_path=str(model_dir),
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_queued=settings.max_num_queued,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        enable_prefix_caching=settings.enable_prefix_caching,
        attention_backend=settings.attention_backend,
        enforce_eager=settings.enforce_eager,
        num_threads=settings.num_threads,
        max_logprobs=settings.max_logprobs,
        load_format=settings.load_format,
        trust_remote_code=settings.trust_remote_code,
        seed=settings.seed,
        tokenizer_path=None if tokenizer_dir is None else str(tokenizer_dir),
        hf_overrides=dict(settings.hf_overrides),
        # Not longer, or much would be computed after a stop string, which only the worker sees.
        output_interval_s=min(settings.stream_interval_ms, 40) / 1000,
    )


if __name__ == "__main__":
    print(example(Settings, GatewaySettings), end="")
