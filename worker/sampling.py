"""A request, the model's own defaults and the server's -> the engine's SamplingParams.

For temperature, top_p, top_k, min_p, repetition_penalty and (chat only) the length of the answer:

    the request  >  DEFAULT_TEMPERATURE  >  OVERRIDE_GENERATION_CONFIG  >  generation_config.json  >  the API's default

An answer never outgrows the context: a max_tokens beyond it is cut to what is left, for chat and completions alike;
a prompt that leaves no room is a 400 before it reaches the engine. Without max_tokens chat takes the rest of the
context, completions 16 tokens. A temperature below 1e-5 is greedy.

Knows token counts and ids, never text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.messages import SamplingParams
from worker.errors import ContextLength, SettingsError
from worker.protocol.generation import Generation
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest
from worker.protocol.validation import fail
from worker.settings import Settings

GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Model:
    """What sampling must know of the model that is served."""

    max_model_len: int
    vocab_size: int
    stop_ids: frozenset[int]  # eos ids, end of turn, the template's stop tokens
    max_logprobs: int = 20  # -1 = no limit


@dataclass(frozen=True, slots=True)
class Defaults:
    """For requests that say nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # for chat; None = the rest of the context
    max_new_tokens_limit: int | None = None  # for everyone: OVERRIDE_GENERATION_CONFIG's max_new_tokens


# field of generation_config.json: (lowest, highest, lowest excluded)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, False),
    "top_p": (0, 1, True),
    "top_k": (-1, 2**31, False),
    "min_p": (0, 1, False),
    "repetition_penalty": (0, 100, True),
    "max_new_tokens": (1, 2**31, False),
}


def defaults(settings: Settings, generation_config: Mapping[str, Any]) -> Defaults:
    """Raises SettingsError for a value that no request could hold."""
    source = generation_config if settings.generation_config == "auto" else {}
    values: dict[str, Any] = {}
    override = settings.override_generation_config
    if unknown := sorted(override.keys() - _RANGES.keys()):
        raise SettingsError(f"OVERRIDE_GENERATION_CONFIG: {unknown[0]!r:.80} is not one of {', '.join(_RANGES)}")
    for where, config in (("generation_config.json", source), ("OVERRIDE_GENERATION_CONFIG", override)):
        for name in _RANGES:
            if config.get(name) is not None:
                values[name] = _checked(where, name, config[name])
    if settings.default_temperature is not None:
        values["temperature"] = settings.default_temperature
    return Defaults(**values, max_new_tokens_limit=override.get("max_new_tokens"))


def _checked(where: str, name: str, value: Any) -> int | float:
    low, high, excluded = _RANGES[name]
    whole = name in ("top_k", "max_new_tokens")
    valid = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
    if not valid or not low <= value <= high or (excluded and value == low):
        raise SettingsError(f"{where}: {name} is {value!r:.80}, which is out of range")
    return value  # type: ignore[no-any-return]


def sampling_params(
    request: ChatCompletionRequest | CompletionRequest,
    model: Model,
    defaults: Defaults,
    *,
    num_prompt_tokens: int,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> SamplingParams:
    """Raises BadRequest or ContextLength. `bad_words`: the request's, as token sequences."""
    max_tokens = _max_tokens(request, model, defaults, num_prompt_tokens)
    if request.min_tokens > max_tokens:
        fail(
            "min_tokens", f"must be at most the {max_tokens} tokens that the answer may have, got {request.min_tokens}"
        )
    temperature = _first(request.temperature, defaults.temperature)
    greedy = temperature < GREEDY_BELOW
    check_token_ids("stop_token_ids", request.stop_token_ids, model.vocab_size)
    check_token_ids("allowed_token_ids", request.allowed_token_ids or (), model.vocab_size)
    check_token_ids("logprob_token_ids", request.logprob_token_ids, model.vocab_size)
    check_token_ids("logit_bias", [token for token, _ in request.logit_bias], model.vocab_size)
    top_k = _first(request.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else temperature,
        top_k=0 if greedy or not 0 < top_k < model.vocab_size else top_k,
        top_p=1.0 if greedy else _first(request.top_p, defaults.top_p),
        min_p=0.0 if greedy else _first(request.min_p, defaults.min_p),
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        bad_words=tuple(bad_words),
        min_tokens=request.min_tokens,
        stop_token_ids=frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else model.stop_ids),
        logprobs=_num_logprobs(request, model),
        prompt_logprobs=_num_prompt_logprobs(request, model),
        logprob_token_ids=request.logprob_token_ids,
    )


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _max_tokens(
    request: ChatCompletionRequest | CompletionRequest, model: Model, defaults: Defaults, num_prompt_tokens: int
) -> int:
    chat = isinstance(request, ChatCompletionRequest)
    param = "messages" if chat else "prompt"
    if num_prompt_tokens == 0:
        fail(
            param, "has no tokens, and this model has none to begin with: there is nothing to continue", "empty_string"
        )
    wanted = request.max_output_tokens
    room = model.max_model_len - num_prompt_tokens
    if room < (0 if wanted == 0 else 1):
        # LangChain knows this error by "prompt is too long", LiteLLM by "this model's maximum context length is".
        raise ContextLength(
            f"The prompt is too long: this model's maximum context length is {model.max_model_len} tokens, and the "
            f"prompt has {num_prompt_tokens}, which leaves no room for an answer. Shorten the {param}.",
            param=param,
        )
    if wanted is None:
        wanted = defaults.max_new_tokens
    limits = (room, wanted, defaults.max_new_tokens_limit)
    return min(limit for limit in limits if limit is not None)


def _num_logprobs(request: ChatCompletionRequest | CompletionRequest, model: Model) -> int | None:
    param = "top_logprobs" if isinstance(request, ChatCompletionRequest) else "logprobs"
    return _checked_count(param, request.num_logprobs, model)


def _num_prompt_logprobs(request: ChatCompletionRequest | CompletionRequest, model: Model) -> int | None:
    """What the client asked for, and what an echoed prompt needs."""
    count = _checked_count("prompt_logprobs", request.prompt_logprobs, model)
    if not (isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None):
        return count
    counts = [request.logprobs] if count is None else [request.logprobs, count]
    return -1 if -1 in counts else max(counts)


def _checked_count(param: str, count: int | None, model: Model) -> int | None:
    limit = model.max_logprobs
    if count is None or limit == -1:
        return count if count is None or count < model.vocab_size else -1
    if count == -1:
        fail(param, f"may be -1 (the whole vocabulary) only where the server sets no limit; it is {limit} here")
    if count > limit:
        fail(param, f"must be at most {limit}, got {count}", "integer_above_max_value")
    return count


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the vocabulary does not have; also for prompts given as ids."""
    if ids and max(ids) >= vocab_size:
        fail(param, f"holds {max(ids)}, but the vocabulary has {vocab_size} tokens", "integer_above_max_value")


def truncated(ids: Sequence[int], request: Generation, model: Model, *, side: str = "left") -> tuple[int, ...]:
    """The prompt cut to truncate_prompt_tokens: its end is kept, or its beginning where the side is "right".

    -1 keeps as much as the context holds beside one token of an answer. `side`: of the tokenizer, where the request
    names none.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return tuple(ids)
    if keep == -1:
        keep = model.max_model_len - 1
    elif keep > model.max_model_len:
        fail("truncate_prompt_tokens", f"must be at most the context length ({model.max_model_len}), got {keep}")
    return tuple(ids[:keep] if (request.truncation_side or side) == "right" else ids[-keep:])
