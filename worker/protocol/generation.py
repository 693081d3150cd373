"""The fields that chat and plain completions share: sampling, stopping, constraints, what is shown."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, model_validator

from worker.protocol.body import Body
from worker.protocol.constraints import GUIDED, WHITESPACE, Constraint, normal_constraint
from worker.protocol.fields import (
    Flag,
    Object,
    TokenIds,
    as_integer,
    checked_by,
    choice,
    integer,
    number,
    string,
    strings,
    wrong,
    wrong_type,
)
from worker.protocol.validation import fail, kind, quote

MAX_N = 128
MAX_LOGIT_BIAS = 1024


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise wrong_type("an object of token ids and biases", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise wrong(f"must have at most {MAX_LOGIT_BIAS} entries, got {len(value)}", "array_above_max_length")
    pairs = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            fail(f"logit_bias.{key[:20]}", "is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            fail(f"logit_bias.{key}", f"must be a number, got {kind(bias)}", "invalid_type")
        if not -100 <= bias <= 100:
            code = "decimal_above_max_value" if bias > 0 else "decimal_below_min_value"
            fail(f"logit_bias.{key}", f"must be in [-100, 100], got {quote(bias)}", code)
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


def _early_stopping(value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "never":
        raise wrong_type('a boolean or "never"', value)
    return value  # type: ignore[no-any-return]


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type("an object", value)
    if len(value) > 16:
        raise wrong("must have at most 16 pairs", "object_above_max_properties")
    for key, entry in value.items():
        if len(key) > 64 or not isinstance(entry, str) or len(entry) > 512:
            raise wrong("must map keys of at most 64 characters to strings of at most 512")
    return value


def _truncate(value: Any) -> int:
    number_of_tokens = as_integer(value)
    if number_of_tokens != -1 and number_of_tokens < 1:
        raise wrong(f"must be -1 (the context length) or at least 1, got {number_of_tokens}", "integer_below_min_value")
    return number_of_tokens


def logprobs_count(value: Any) -> int:
    count = as_integer(value)
    if count < -1:
        raise wrong(f"must be -1 (the whole vocabulary) or at least 0, got {count}", "integer_below_min_value")
    return count


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, dict) else value


class Generation(Body):
    """The fields that chat and plain completions share."""

    # how many answers
    n: Annotated[int, integer(1, MAX_N)] = 1
    best_of: Annotated[int | None, integer(0, MAX_N)] = None
    use_beam_search: Flag = False
    length_penalty: Annotated[float, number(-10, 10)] = 1.0
    early_stopping: Annotated[bool | str, checked_by(_early_stopping)] = False

    # how tokens are drawn; None = the model's or the server's default
    temperature: Annotated[float | None, number(0, 2)] = None
    top_p: Annotated[float | None, number(above=0, high=1)] = None
    top_k: Annotated[int | None, integer(-1)] = None
    min_p: Annotated[float | None, number(0, 1)] = None
    repetition_penalty: Annotated[float | None, number(above=0, high=100)] = None
    presence_penalty: Annotated[float, number(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, number(-2, 2)] = 0.0
    seed: Annotated[int | None, integer()] = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], checked_by(_logit_bias)] = ()
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[tuple[str, ...], strings(128, 1024)] = ()

    # where the answer ends
    stop: Annotated[tuple[str, ...], strings(4, 1024, single=True)] = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    min_tokens: Annotated[int, integer(0)] = 0

    # what is shown
    stream: Flag = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, integer(1)] = 1
    echo: Flag = False
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True
    prompt_logprobs: Annotated[int | None, checked_by(logprobs_count)] = None
    logprob_token_ids: TokenIds = ()
    return_tokens_as_token_ids: Flag = False
    return_token_ids: Flag = False
    return_prompt_text: Flag = False

    # the prompt
    truncate_prompt_tokens: Annotated[int | None, checked_by(_truncate)] = None
    truncation_side: Annotated[str | None, choice("left", "right")] = None
    cache_salt: Annotated[str, string(128, min_chars=1, without="@/\\\0")] = ""

    # constraints on the text: `constraint` is the normal form of all of these
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None
    guided_whitespace_pattern: Any = None

    # checked, kept, and without effect here
    user: Annotated[str | None, string(1024)] = None
    session_id: Annotated[str | None, string(1024)] = None
    metadata: Annotated[dict[str, str] | None, checked_by(_metadata)] = None
    store: Flag = False
    service_tier: Annotated[str | None, string(64)] = None
    safety_identifier: Annotated[str | None, string(1024)] = None
    prompt_cache_key: Annotated[str | None, string(1024)] = None
    prompt_cache_retention: Annotated[str | None, string(64)] = None
    prompt_cache_options: Object | None = None
    prediction: Object | None = None
    verbosity: Annotated[str | None, string(64)] = None
    guided_decoding_backend: Annotated[str | None, string(64)] = None

    @cached_property
    def constraint(self) -> Constraint | None:
        names = ("response_format", "structured_outputs", *GUIDED, WHITESPACE)
        return normal_constraint({name: value for name in names if (value := getattr(self, name)) is not None})

    @property
    def num_sequences(self) -> int:
        """Sequences the engine runs for one prompt: `best_of` candidates or beams, of which `n` are answered."""
        return max(self.n, self.best_of or 0)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _check_together(self) -> None:
        if self.stream_options is not None and not self.stream:
            fail("stream_options", "can only be given where stream is true")
        if self.best_of and self.best_of < self.n:
            fail("best_of", f"must be at least n ({self.n}), got {self.best_of}")
        if len(self.logprob_token_ids) > 128:
            fail("logprob_token_ids", "must have at most 128 entries", "array_above_max_length")
        if self.allowed_token_ids == ():
            fail("allowed_token_ids", "must not be empty", "empty_array")
        if self.prompt_logprobs is not None and self.stream:
            fail("prompt_logprobs", "cannot be streamed")
        if self.use_beam_search and self.logprob_token_ids:
            fail("logprob_token_ids", "cannot be combined with use_beam_search")
        _ = self.constraint
