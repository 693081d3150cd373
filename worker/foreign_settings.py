"""Variables of other servers that mean nothing here, as data.

People bring the environment of the worker they had. A variable that only tuned the other engine is named once in a
warning; one that asks for something this engine cannot do, so that the answers would differ or the model not fit,
ends the start with its name.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.environment import is_unset
from worker.errors import SettingsError, clip

# Tuned another engine, or switches on what is always on here.
MEANINGLESS = frozenset(
    """
    ASYNC_SCHEDULING CHAT_TEMPLATE_CONTENT_FORMAT CODE_REVISION COMPILATION_CONFIG CPU_OFFLOAD_GB
    DISABLE_CUSTOM_ALL_REDUCE DISABLE_GRAMMAR_SUPPORT DISABLE_LOG_REQUESTS DISABLE_LOG_STATS
    DISTRIBUTED_EXECUTOR_BACKEND ENABLE_CHUNKED_PREFILL ENABLE_EXPERT_PARALLEL ENABLE_LOG_OUTPUTS
    ENABLE_PROMPT_TOKENS_DETAILS ENABLE_SLEEP_MODE ENGINE_USE_RAY FULLY_SHARDED_LORAS GUIDED_DECODING_BACKEND
    KV_OFFLOADING_SIZE LIMIT_MM_PER_PROMPT LOG_ERROR_STACK LONG_PREFILL_TOKEN_THRESHOLD LORA_DTYPE
    LORA_EXTRA_VOCAB_SIZE MAX_BEST_OF MAX_CONCURRENT_REQUESTS MAX_CONTEXT_LEN_TO_CAPTURE MAX_CPU_LORAS
    MAX_INPUT_LENGTH MAX_INPUT_TOKENS MAX_LORAS MAX_LORA_RANK MAX_NUM_QUEUED_TOKENS MAX_PARALLEL_LOADING_WORKERS
    MAX_SEQ_LEN_TO_CAPTURE MM_PROCESSOR_KWARGS MODEL_IMPL MODEL_TYPE NUM_LOOKAHEAD_SLOTS PREEMPTION_MODE
    PREFIX_CACHING_HASH_ALGO RAY_WORKERS_USE_NSIGHT REQUEST_TIMEOUT SCHEDULER_DELAY_FACTOR SCHEDULING_POLICY
    SPECULATIVE_DISABLE_BY_BATCH_SIZE SPECULATIVE_DRAFT_TENSOR_PARALLEL_SIZE SPECULATIVE_ENFORCE_EAGER
    SPECULATIVE_MAX_MODEL_LEN SPECULATIVE_MODEL_REVISION SPECULATIVE_QUANTIZATION STREAM_INTERVAL
    STRUCTURED_OUTPUTS_CONFIG SWAP_SPACE TOKENIZER_MODE UVICORN_LOG_LEVEL VLLM_BASE_URL VLLM_NIGHTLY VLLM_PORT
    VLLM_STARTUP_TIMEOUT WORKER_CUDA_VERSION WORKER_USE_RAY
    """.split()
)
# The variables of llama.cpp's server.
MEANINGLESS_PREFIX = "LLAMA_ARG_"

_OFF = ("0", "false", "no", "off")
_ONE = ("0", "1")
_PARALLEL = "this engine runs on one device"
_LORA = "adapters are not supported"
_SPECULATIVE = "speculative decoding is not supported"
_ROPE = "write it into HF_OVERRIDES instead"

# name: (values that ask for nothing, why anything else is refused)
IMPOSSIBLE: dict[str, tuple[tuple[str, ...], str]] = {
    "TENSOR_PARALLEL_SIZE": (_ONE, _PARALLEL),
    "PIPELINE_PARALLEL_SIZE": (_ONE, _PARALLEL),
    "DATA_PARALLEL_SIZE": (_ONE, _PARALLEL),
    "NUM_SHARD": (_ONE, _PARALLEL),
    "ENABLE_LORA": (_OFF, _LORA),
    "LORA_MODULES": (("[]", "{}"), _LORA),
    "LORA_ADAPTERS": ((), _LORA),
    "LONG_LORA_SCALING_FACTORS": (_OFF, _LORA),
    "SPECULATIVE_CONFIG": (("0", "{}"), _SPECULATIVE),
    "SPECULATIVE_METHOD": (("0",), _SPECULATIVE),
    "SPECULATIVE_MODEL": (("0",), _SPECULATIVE),
    "NUM_SPECULATIVE_TOKENS": (("0",), _SPECULATIVE),
    "NGRAM_PROMPT_LOOKUP_MIN": (("0",), _SPECULATIVE),
    "NGRAM_PROMPT_LOOKUP_MAX": (("0",), _SPECULATIVE),
    "KV_CACHE_DTYPE": (("auto", "0"), "the cache has the model's dtype"),
    "QUANTIZATION_PARAM_PATH": (("0",), "a checkpoint's own quantization config is what counts"),
    "ROPE_SCALING": (("0", "{}"), _ROPE),
    "ROPE_THETA": (("0",), _ROPE),
    "DISABLE_SLIDING_WINDOW": (_OFF, "a model's sliding window is always honoured"),
    "LOGPROBS_MODE": (("raw_logprobs",), "log-probabilities are of the raw distribution"),
    "SKIP_TOKENIZER_INIT": (_OFF, "text needs a tokenizer"),
    "TASK": (("auto", "generate"), "this server generates text only"),
    "RUNNER": (("auto", "generate"), "this server generates text only"),
    "RAW_OPENAI_OUTPUT": (("1", "true", "yes", "on"), "streamed answers are always server-sent events"),
    "VLLM_CONFIG_FILE": ((), "write its settings into the environment"),
    "VLLM_EXTRA_ARGS": ((), "write its settings into the environment"),
}


def check(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the variables that are set and mean nothing here. Raises SettingsError for an impossible one."""
    for name, (harmless, reason) in IMPOSSIBLE.items():
        value = environ.get(name)
        if value is not None and not is_unset(value) and value.strip().lower() not in harmless:
            # Free-form values may hold keys and tokens: only those that are one word or a number are shown.
            shown = f"={clip(value, 100)}" if harmless else ""
            raise SettingsError(f"{name}{shown} is not possible here: {reason}")
    return tuple(
        sorted(
            name
            for name, value in environ.items()
            if (name in MEANINGLESS or name.startswith(MEANINGLESS_PREFIX)) and not is_unset(value)
        )
    )
