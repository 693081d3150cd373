"""Settings: what the environment may say, what is refused by name, and that everything derives from one declaration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.messages import EngineConfig
from worker.environment import declared, example, is_unset, read, setting
from worker.environment import flag as flag_type
from worker.errors import SettingsError
from worker.foreign_settings import IMPOSSIBLE, MEANINGLESS
from worker.settings import GatewaySettings, Settings, engine_config, public_name

ROOT = Path(__file__).parents[2]


def settings(**environ: str) -> Settings:
    return Settings.from_env(environ, has_gpu=False)


@dataclasses.dataclass(frozen=True)
class Two:
    on: bool = setting("Group", "ON", of=flag_type, default=True, help="")
    off: bool = setting("Group", "OFF", of=flag_type, default=False, help="")


@pytest.mark.parametrize("value", ["1", "true", "TRUE", " yes ", "on"])
def test_words_for_true(value: str) -> None:
    assert read(Two, {"ON": value, "OFF": value}) == Two(True, True)


@pytest.mark.parametrize("value", ["0", "false", "No", "off"])
def test_words_for_false(value: str) -> None:
    assert read(Two, {"ON": value, "OFF": value}) == Two(False, False)


@pytest.mark.parametrize("value", ["", "   ", None])
def test_an_empty_boolean_keeps_its_default(value: str | None) -> None:
    environ = {} if value is None else {"ON": value, "OFF": value}
    assert read(Two, environ) == Two(True, False)


@pytest.mark.parametrize("name", ["ON", "OFF"])
@pytest.mark.parametrize("value", ["enabled", "2", "tru"])
def test_any_other_boolean_names_the_variable_and_the_words(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as error:
        read(Two, {name: value})
    assert f"{name}={value}" in str(error.value) and "yes" in str(error.value)


@pytest.mark.parametrize("value", ["None", "none", "null", "NULL", "", " ", "0"])
@pytest.mark.parametrize(
    "name", ["QUANTIZATION", "MODEL_REVISION", "CUSTOM_CHAT_TEMPLATE", "MAX_NUM_SEQS", "HF_OVERRIDES"]
)
def test_what_a_console_writes_into_an_empty_field_is_unset(name: str, value: str) -> None:
    assert settings(**{name: value}) == settings()


def test_zero_is_a_value_where_it_means_something() -> None:
    assert settings(DEFAULT_TEMPERATURE="0").default_temperature == 0.0
    assert settings(SEED="0", STREAM_INTERVAL_MS="0").stream_interval_ms == 0


@pytest.mark.parametrize("value", ["-1", "0", ""])
def test_the_models_own_context_is_the_default(value: str) -> None:
    assert settings(MAX_MODEL_LEN=value).max_model_len is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_MODEL_LEN", "8k"),
        ("MAX_MODEL_LEN", "-2"),
        ("MAX_MODEL_LEN", "9" * 5000),
        ("MAX_NUM_SEQS", "1.5"),
        ("GPU_MEMORY_UTILIZATION", "1.5"),
        ("GPU_MEMORY_UTILIZATION", "nan"),
        ("DTYPE", "int8"),
        ("QUANTIZATION", "awq"),
        ("HF_OVERRIDES", "[1]"),
        ("HF_OVERRIDES", "[" * 100_000),
        ("OVERRIDE_GENERATION_CONFIG", "not json"),
        ("DEFAULT_TEMPERATURE", "3"),
        ("OPENAI_SERVED_MODEL_NAME_OVERRIDE", ","),
        ("DEFAULT_BATCH_SIZE", "-1"),
    ],
)
def test_a_bad_value_ends_the_start_with_its_name_and_value(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as error:
        settings(**{name: value})
    assert str(error.value).startswith(f"{name}={value[:20]}") and len(str(error.value)) < 400


def test_secrets_stay_strings_and_are_never_shown() -> None:
    for token in ("tok_example_1", "true", "1"):
        assert settings(HF_TOKEN=token).hf_token == token
    secretive = settings(HF_TOKEN="tok_example_1")
    assert "tok_example_1" not in repr(secretive) + str(secretive.describe())
    assert "HF_TOKEN=***" in secretive.describe()
    with pytest.raises(SettingsError) as error:
        settings(HF_TOKEN="tok_example_1", HUGGING_FACE_HUB_TOKEN="tok_example_2")
    assert "tok_example" not in str(error.value) and "HUGGING_FACE_HUB_TOKEN" in str(error.value)
    gateway = GatewaySettings.from_env({"API_KEY": "sk-1"})
    assert gateway.api_key == "sk-1" and "sk-1" not in repr(gateway)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("CORS_ORIGINS", "*", ("*",)),
        (
            "CORS_ORIGINS",
            "https://App.example/, http://localhost:5173",
            ("https://app.example", "http://localhost:5173"),
        ),
        ("CORS_ORIGINS", "chrome-extension://abcdef", ("chrome-extension://abcdef",)),
        ("CORS_ORIGINS", "localhost:5173", None),
        ("CORS_ORIGINS", "app.example", None),
        ("CORS_ORIGINS", "https://app.example/page", None),
        ("ALLOWED_HOSTS", "Tunnel.example, *", ("tunnel.example", "*")),
        ("ALLOWED_HOSTS", "my_box,fe80::1", ("my_box", "fe80::1")),
        ("ALLOWED_HOSTS", "https://tunnel.example", None),
        ("ALLOWED_HOSTS", "tunnel.example:443", None),
        ("API_KEY", "sk-1 2", "sk-1 2"),
        ("API_KEY", "schlüssel", None),
        ("API_KEY", "sk-1\nsk-2", None),
    ],
)
def test_what_no_header_could_match_is_no_value_for_it(name: str, value: str, expected: Any) -> None:
    """An origin without a scheme, a host with a port or a key beyond ASCII was taken, and then never matched."""
    if expected is None:
        with pytest.raises(SettingsError, match=name) as error:
            GatewaySettings.from_env({name: value})
        assert name != "API_KEY" or value not in str(error.value)
    else:
        assert getattr(GatewaySettings.from_env({name: value}), name.lower()) == expected


def test_two_names_of_one_setting_must_agree() -> None:
    assert settings(MIN_BATCH_SIZE="4", DEFAULT_MIN_BATCH_SIZE="4").min_batch_size == 4
    assert settings(TOKENIZER="None", TOKENIZER_NAME="org/t").tokenizer_name == "org/t"
    with pytest.raises(SettingsError, match="MIN_BATCH_SIZE"):
        settings(MIN_BATCH_SIZE="4", DEFAULT_MIN_BATCH_SIZE="5")


def test_a_template_by_name_and_a_template_by_text_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match=r"MODEL_TEMPLATE_TYPE.*CUSTOM_CHAT_TEMPLATE"):
        settings(MODEL_TEMPLATE_TYPE="qwen", CUSTOM_CHAT_TEMPLATE="{{ messages }}")
    assert settings(MODEL_TEMPLATE_TYPE="qwen", CUSTOM_CHAT_TEMPLATE="None").model_template_type == "qwen"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TENSOR_PARALLEL_SIZE", "4"),
        ("ENABLE_LORA", "true"),
        ("LORA_MODULES", '{"name": "a", "path": "/x"}'),
        ("LORA_MODULES", '[{"name": "a"}]'),
        ("LORA_MODULES", "not json"),
        ("SPECULATIVE_CONFIG", '{"method": "ngram"}'),
        ("KV_CACHE_DTYPE", "fp8"),
        ("RAW_OPENAI_OUTPUT", "0"),
        ("TASK", "embed"),
        ("ROPE_THETA", "10000"),
    ],
)
def test_what_this_engine_cannot_do_ends_the_start_with_its_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        settings(**{name: value})


@pytest.mark.parametrize(
    "environ",
    [
        {"LORA_MODULES": "[]"},
        {"LORA_MODULES": ""},
        {"TENSOR_PARALLEL_SIZE": "1"},
        {"ENABLE_LORA": "false"},
        {"KV_CACHE_DTYPE": "auto"},
        {"SPECULATIVE_CONFIG": "None"},
        {"RAW_OPENAI_OUTPUT": "1"},
        {"ENABLE_AUTO_TOOL_CHOICE": "true"},
    ],
)
def test_the_same_variables_at_rest_change_nothing(environ: dict[str, str]) -> None:
    assert settings(**environ) == settings()


def test_free_text_that_may_hold_a_key_is_not_shown() -> None:
    with pytest.raises(SettingsError) as error:
        settings(VLLM_EXTRA_ARGS="--api-key sk-1")
    assert "sk-1" not in str(error.value)


def test_variables_of_other_servers_are_named_once() -> None:
    read_back = settings(
        SWAP_SPACE="4", ENABLE_CHUNKED_PREFILL="true", LLAMA_ARG_CTX_SIZE="1", MAX_LORAS="", PATH="/bin"
    )
    assert read_back.ignored == ("ENABLE_CHUNKED_PREFILL", "LLAMA_ARG_CTX_SIZE", "SWAP_SPACE")


# The variables of the platform's own vLLM worker, old and new, and those that users of other servers bring.
FAMILIAR = """
MODEL_NAME MODEL_REVISION TOKENIZER TOKENIZER_NAME TOKENIZER_REVISION TOKENIZER_MODE SKIP_TOKENIZER_INIT
TRUST_REMOTE_CODE DOWNLOAD_DIR LOAD_FORMAT DTYPE KV_CACHE_DTYPE QUANTIZATION QUANTIZATION_PARAM_PATH
CUSTOM_CHAT_TEMPLATE BASE_PATH HF_TOKEN MAX_MODEL_LEN GPU_MEMORY_UTILIZATION MAX_NUM_SEQS MAX_NUM_BATCHED_TOKENS
BLOCK_SIZE SWAP_SPACE ENFORCE_EAGER MAX_SEQ_LEN_TO_CAPTURE MAX_CONTEXT_LEN_TO_CAPTURE DISABLE_CUSTOM_ALL_REDUCE
CPU_OFFLOAD_GB NUM_GPU_BLOCKS_OVERRIDE ENABLE_PREFIX_CACHING ENABLE_CHUNKED_PREFILL DISABLE_SLIDING_WINDOW SEED
MAX_LOGPROBS NUM_LOOKAHEAD_SLOTS SCHEDULER_DELAY_FACTOR PREEMPTION_MODE ROPE_SCALING ROPE_THETA HF_OVERRIDES
GUIDED_DECODING_BACKEND ATTENTION_BACKEND VLLM_ATTENTION_BACKEND ASYNC_SCHEDULING STREAM_INTERVAL
LIMIT_MM_PER_PROMPT TENSOR_PARALLEL_SIZE PIPELINE_PARALLEL_SIZE DISTRIBUTED_EXECUTOR_BACKEND WORKER_USE_RAY
RAY_WORKERS_USE_NSIGHT MAX_PARALLEL_LOADING_WORKERS ENABLE_EXPERT_PARALLEL ENABLE_LORA MAX_LORAS MAX_LORA_RANK
LORA_EXTRA_VOCAB_SIZE LORA_DTYPE LONG_LORA_SCALING_FACTORS MAX_CPU_LORAS FULLY_SHARDED_LORAS LORA_MODULES
SPECULATIVE_CONFIG SPECULATIVE_METHOD SPECULATIVE_MODEL NUM_SPECULATIVE_TOKENS NGRAM_PROMPT_LOOKUP_MAX
NGRAM_PROMPT_LOOKUP_MIN DEFAULT_BATCH_SIZE DEFAULT_MIN_BATCH_SIZE MIN_BATCH_SIZE DEFAULT_BATCH_SIZE_GROWTH_FACTOR
BATCH_SIZE_GROWTH_FACTOR RAW_OPENAI_OUTPUT OPENAI_SERVED_MODEL_NAME_OVERRIDE SERVED_MODEL_NAME OPENAI_RESPONSE_ROLE
RESPONSE_ROLE ENABLE_AUTO_TOOL_CHOICE TOOL_CALL_PARSER REASONING_PARSER TRUST_REQUEST_CHAT_TEMPLATE
RETURN_TOKENS_AS_TOKEN_IDS EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE ENABLE_PROMPT_TOKENS_DETAILS
ENABLE_FORCE_INCLUDE_USAGE ENABLE_LOG_OUTPUTS LOG_ERROR_STACK MAX_CONCURRENCY DISABLE_LOG_STATS ENABLE_LOG_REQUESTS
DISABLE_LOG_REQUESTS MAX_LOG_LEN VLLM_CONFIG_FILE VLLM_PORT VLLM_BASE_URL VLLM_STARTUP_TIMEOUT REQUEST_TIMEOUT
VLLM_EXTRA_ARGS CODE_REVISION KV_CACHE_MEMORY_BYTES PREFIX_CACHING_HASH_ALGO LONG_PREFILL_TOKEN_THRESHOLD
SCHEDULING_POLICY MAX_NUM_QUEUED_REQS MAX_NUM_QUEUED_TOKENS COMPILATION_CONFIG DATA_PARALLEL_SIZE
STRUCTURED_OUTPUTS_CONFIG CHAT_TEMPLATE_CONTENT_FORMAT DEFAULT_CHAT_TEMPLATE_KWARGS GENERATION_CONFIG
OVERRIDE_GENERATION_CONFIG LOGPROBS_MODE KV_OFFLOADING_SIZE MM_PROCESSOR_KWARGS MODEL_IMPL UVICORN_LOG_LEVEL
ENABLE_SLEEP_MODE TASK MODEL_ID MAX_INPUT_TOKENS MAX_TOTAL_TOKENS MAX_BATCH_PREFILL_TOKENS QUANTIZE NUM_SHARD
MODEL_TYPE CHECKPOINT_PATH TOKENIZER_PATH START_PORT MODEL_TEMPLATE_TYPE SPECULATIVE_DRAFT_TENSOR_PARALLEL_SIZE
SPECULATIVE_ENFORCE_EAGER
""".split()
# What these two ask for is always so.
GRANTED = {"ENABLE_AUTO_TOOL_CHOICE", "SCHEDULING_POLICY"}


def test_every_familiar_variable_is_honoured_warned_about_or_refused() -> None:
    honoured = {name for cls in (Settings, GatewaySettings) for _, entry in declared(cls) for name in entry.names}
    assert not [name for name in FAMILIAR if name not in honoured | MEANINGLESS | set(IMPOSSIBLE) | GRANTED]
    assert not honoured & (MEANINGLESS | set(IMPOSSIBLE)) and not MEANINGLESS & set(IMPOSSIBLE)


def test_no_variable_belongs_to_two_settings() -> None:
    seen = [name for cls in (Settings, GatewaySettings) for _, entry in declared(cls) for name in entry.names]
    assert len(seen) == len(set(seen))


def test_the_example_file_is_rendered_from_the_settings() -> None:
    assert (ROOT / ".env.example").read_text() == example(Settings, GatewaySettings)


def test_the_example_file_uncommented_is_the_default() -> None:
    lines = example(Settings, GatewaySettings).splitlines()
    environ = dict(
        line[1:].split("=", 1) for line in lines if line.startswith("#") and line[1:2].isupper() and "=" in line
    )
    assert {"MODEL_NAME", "PORT"} < set(environ)
    assert Settings.from_env(environ, has_gpu=False) == settings()
    assert GatewaySettings.from_env(environ) == GatewaySettings()


@pytest.mark.parametrize(
    ("environ", "seqs", "tokens", "jobs"),
    [
        ({}, 64, 256, 130),
        ({"MAX_NUM_SEQS": "8"}, 8, 256, 18),
        ({"MAX_NUM_SEQS": "1000"}, 1000, 1000, 2002),
        ({"MAX_NUM_SEQS": "8", "MAX_CONCURRENCY": "5", "MAX_NUM_BATCHED_TOKENS": "64"}, 8, 64, 5),
    ],
)
def test_limits_that_depend_on_one_another(environ: dict[str, str], seqs: int, tokens: int, jobs: int) -> None:
    got = settings(**environ)
    assert (got.max_num_seqs, got.max_num_batched_tokens, got.max_concurrency) == (seqs, tokens, jobs)


def test_a_gpu_has_larger_defaults_unless_the_cpu_is_asked_for() -> None:
    assert Settings.from_env({}, has_gpu=True).max_num_seqs == 256
    assert Settings.from_env({"DEVICE": "cpu"}, has_gpu=True).max_num_seqs == 64


def test_everything_the_engine_can_be_told_reaches_it() -> None:
    environ = {
        "DEVICE": "cpu", "DTYPE": "bf16", "QUANTIZATION": "int8", "MAX_MODEL_LEN": "64", "MAX_NUM_SEQS": "3",
        "MAX_NUM_BATCHED_TOKENS": "32", "MAX_NUM_QUEUED_REQS": "9", "GPU_MEMORY_UTILIZATION": "0.5",
        "KV_CACHE_MEMORY_BYTES": "1000", "NUM_GPU_BLOCKS_OVERRIDE": "7", "BLOCK_SIZE": "32",
        "ENABLE_PREFIX_CACHING": "no", "ATTENTION_BACKEND": "FLASH_ATTN", "ENFORCE_EAGER": "1", "NUM_THREADS": "2",
        "MAX_LOGPROBS": "5", "LOAD_FORMAT": "dummy", "TRUST_REMOTE_CODE": "1", "SEED": "4", "HF_OVERRIDES": '{"a": 1}',
    }  # fmt: skip
    config = engine_config(settings(**environ), Path("/models/m"), Path("/models/t"))
    default = EngineConfig(model_path="")
    same = [
        entry.name
        for entry in dataclasses.fields(config)
        if getattr(config, entry.name) == getattr(default, entry.name)
    ]
    assert same == [], "a field of EngineConfig that no setting reaches"
    assert (config.dtype, config.attention_backend, config.hf_overrides) == ("bfloat16", "flash", {"a": 1})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("/root/.cache/models/SmolLM2", "SmolLM2"),
        ("./models/x/", "x"),
        ("/v/hub/models--org--m/snapshots/0123abc", "org/m"),
    ],
)
def test_clients_see_a_name_and_no_path(model: str, name: str) -> None:
    assert public_name(model) == name
    assert settings(MODEL_NAME=model).served_names == (name,)


def test_served_names_are_a_comma_list() -> None:
    assert settings(MODEL_NAME="org/m", SERVED_MODEL_NAME=" a, b ,").served_names == ("a", "b")


def test_a_missing_model_is_named() -> None:
    with pytest.raises(SettingsError, match="MODEL_NAME"):
        _ = settings(MODEL_NAME="").model


def test_a_revision_is_kept_for_model_and_tokenizer() -> None:
    got = settings(MODEL_NAME="org/m", MODEL_REVISION="abc123", TOKENIZER_REVISION="def")
    assert (got.model_revision, got.tokenizer_revision) == ("abc123", "def")


def test_none_is_a_word_where_it_is_a_choice() -> None:
    assert settings(GENERATION_CONFIG="none").generation_config == "none"
    assert settings(GENERATION_CONFIG="vllm").generation_config == "none"
    assert settings(GENERATION_CONFIG="").generation_config == "auto"


@pytest.mark.parametrize("value", ["x", "0.5", "tok"])
def test_other_text_is_a_value(value: Any) -> None:
    assert not is_unset(value)
