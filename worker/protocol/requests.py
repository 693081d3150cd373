"""The request bodies: every field with its default, its range and its error.

    request = ChatCompletionRequest.parse(body)     # or a WorkerError that names the field
    request.ignored_fields()                        # what was accepted without meaning anything here

null means absent, for every field. A field that is known and impossible here is refused by name (UNSUPPORTED);
one that changes nothing (`store`, `user`, ...) is checked and kept; an unknown one is kept and reported.
Limits that depend on the model (context, vocabulary) are applied by worker.sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from worker.errors import BadRequest
from worker.protocol.constraints import GUIDED, Constraint, normal_constraint
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
from worker.protocol.messages import normal_messages
from worker.protocol.tools import (
    Tool,
    ToolChoice,
    normal_choice,
    normal_function_call,
    normal_functions,
    normal_tools,
)
from worker.protocol.validation import check_json, explain, fail, kind

MAX_N = 128
MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # prompts x n, or x best_of
MAX_LOGIT_BIAS = 1024
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# Known, and impossible here: the field, the values that ask for nothing, and what to say.
_NOT_HERE = "is not supported by this server"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "modalities": ((["text"],), 'must be ["text"]: this server makes text only'),
    "audio": ((), "is not supported: this server makes text only"),
    "web_search_options": ((), "is not supported: this server cannot search the web"),
    "moderation": ((), _NOT_HERE),
    "prompt_embeds": ((), _NOT_HERE),
    "mm_processor_kwargs": (({},), "is not supported: this server takes text only"),
    "media_io_kwargs": (({},), "is not supported: this server takes text only"),
    "mm_payload": ((), "is not supported: this server takes text only"),
    "kv_transfer_params": ((), _NOT_HERE),
    "ec_transfer_params": ((), _NOT_HERE),
    "vllm_xargs": (({},), _NOT_HERE),
    "routed_experts_prompt_start": ((), _NOT_HERE),
    "watermarking": ((), _NOT_HERE),
    "return_token_offsets": ((False,), _NOT_HERE),
    "thinking_token_budget": ((-1,), _NOT_HERE),
    "repetition_detection": ((), _NOT_HERE),
    "guided_whitespace_pattern": ((), _NOT_HERE),
}
# Names that the template's renderer sets itself.
RESERVED_TEMPLATE_KWARGS = frozenset(
    "messages tools documents chat_template tokenize add_generation_prompt continue_final_message raise_exception "
    "strftime_now return_dict return_tensors bos_token eos_token pad_token unk_token".split()
)


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
        pairs.append((int(key), max(-100.0, min(100.0, float(bias)))))
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


def _documents(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong_type("an array of objects", value)
    return value


def _template_kwargs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type("an object", value)
    for key in value:
        if key in RESERVED_TEMPLATE_KWARGS:
            fail(f"chat_template_kwargs.{key}", "is set by the server and cannot be given")
    return value


def _truncate(value: Any) -> int:
    number_of_tokens = as_integer(value)
    if number_of_tokens != -1 and number_of_tokens < 1:
        raise wrong(f"must be -1 (the context length) or at least 1, got {number_of_tokens}", "integer_below_min_value")
    return number_of_tokens


def _logprobs_count(value: Any) -> int:
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


class Body(BaseModel):
    """What all request bodies share: parsing, the model's name, and who asks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: Annotated[str, string(256)] = ""
    request_id: Annotated[str | None, string(128, min_chars=1, printable=True)] = None
    priority: Annotated[int, integer()] = 0

    @classmethod
    def parse(cls, body: Any) -> Self:
        """Validate a JSON body; raises WorkerError."""
        if not isinstance(body, dict):
            raise BadRequest(
                f"the request body must be a JSON object, got {kind(body)}", param="body", code="invalid_type"
            )
        check_json(body)
        given = {key: value for key, value in body.items() if value is not None}
        for name, (harmless, text) in UNSUPPORTED.items():
            if name in given and given[name] not in harmless:
                fail(name, text, "unsupported_parameter")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise explain(error) from None

    def ignored_fields(self) -> list[str]:
        """Names of the fields that mean nothing to this server, at most 20, for a log line and a header."""
        return [name[:64] for name in sorted(self.model_extra or {}) if name not in UNSUPPORTED][:20]


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
    prompt_logprobs: Annotated[int | None, checked_by(_logprobs_count)] = None
    logprob_token_ids: Annotated[TokenIds, Field()] = ()
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
        names = ("response_format", "structured_outputs", *GUIDED)
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


class ChatCompletionRequest(Generation):
    messages: Annotated[list[dict[str, Any]], checked_by(normal_messages)]
    max_tokens: Annotated[int | None, integer(1)] = None
    max_completion_tokens: Annotated[int | None, integer(1)] = None
    logprobs: Flag = False
    top_logprobs: Annotated[int | None, checked_by(_logprobs_count)] = None
    add_special_tokens: Flag = False

    tools: Annotated[tuple[Tool, ...], checked_by(normal_tools)] = ()
    functions: Annotated[tuple[Tool, ...], checked_by(normal_functions)] = ()
    tool_choice: Any = None
    function_call: Any = None
    parallel_tool_calls: Flag = True

    reasoning_effort: Annotated[str | None, choice(*REASONING_EFFORTS)] = None
    include_reasoning: Flag = True
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    documents: Annotated[list[dict[str, Any]] | None, checked_by(_documents)] = None
    chat_template: Annotated[str | None, string(1_000_000)] = None
    chat_template_kwargs: Annotated[dict[str, Any], checked_by(_template_kwargs)] = Field(default_factory=dict)

    @cached_property
    def all_tools(self) -> tuple[Tool, ...]:
        """`tools`, or the legacy `functions`."""
        return self.tools or self.functions

    @cached_property
    def choice_of_tools(self) -> ToolChoice:
        """tool_choice or function_call in normal form; kind "none" where no tool may be called."""
        if self.legacy_functions:
            return normal_function_call(self.function_call, self.functions)
        return normal_choice(self.tool_choice, self.tools)

    @property
    def legacy_functions(self) -> bool:
        """The client speaks `functions` / `function_call` and is answered in `function_call`."""
        return bool(self.functions) or self.function_call is not None

    @property
    def num_logprobs(self) -> int | None:
        """None = no logprobs; otherwise how many alternatives at each position."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_together()
        if self.top_logprobs and not self.logprobs:
            fail("top_logprobs", "needs logprobs to be true")
        if self.logprob_token_ids and not self.logprobs:
            fail("logprob_token_ids", "needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            # Both are defaults of some client; only a request that names both contradicts itself.
            if "add_generation_prompt" in self.model_fields_set:
                fail("continue_final_message", "cannot be combined with add_generation_prompt")
            object.__setattr__(self, "add_generation_prompt", False)
        if (self.tools or self.tool_choice is not None) and self.legacy_functions:
            fail("functions" if self.functions else "function_call", "cannot be combined with tools and tool_choice")
        _ = self.choice_of_tools
        return self

    def check_template(self, *, trusted: bool) -> None:
        """Refuse a template of the client's own unless the server was told to trust them."""
        if self.chat_template is not None and not trusted:
            fail("chat_template", "is not accepted by this server (TRUST_REQUEST_CHAT_TEMPLATE is off)",
                 "unsupported_parameter")  # fmt: skip


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A string, strings, token ids, or lists of token ids -> a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        fail("prompt", f"must be a string or an array, got {kind(value)}", "invalid_type")
    if not value:
        fail("prompt", "must not be empty", "empty_array")
    if not isinstance(value[0], str | list):
        return (_ids(value, "prompt"),)
    if len(value) > MAX_PROMPTS:
        fail("prompt", f"must have at most {MAX_PROMPTS} prompts, got {len(value)}", "array_above_max_length")
    return tuple(item if isinstance(item, str) else _ids(item, f"prompt[{index}]") for index, item in enumerate(value))


def _ids(value: Any, path: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        fail(path, f"must be a string or an array of token ids, got {kind(value)}", "invalid_type")
    if not value:
        fail(path, "must not be empty", "empty_array")
    if set(map(type, value)) != {int}:
        index = next(index for index, item in enumerate(value) if type(item) is not int)
        fail(f"{path}[{index}]", f"must be a token id, got {kind(value[index])}", "invalid_type")
    if min(value) < 0:
        fail(path, "must hold token ids, which are never negative", "integer_below_min_value")
    return tuple(value)


class CompletionRequest(Generation):
    prompt: Annotated[tuple[str | tuple[int, ...], ...], checked_by(_prompts)]
    max_tokens: Annotated[int, integer(0)] = 16
    logprobs: Annotated[int | None, checked_by(_logprobs_count)] = None
    suffix: Annotated[str | None, string(1_000_000)] = None
    add_special_tokens: Flag = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def max_output_tokens(self) -> int:
        return self.max_tokens

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_together()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            fail("max_tokens", "must be at least 1 unless echo is true", "integer_below_min_value")
        if self.suffix is not None and self.echo:
            fail("suffix", "cannot be combined with echo")
        if self.logprob_token_ids and self.logprobs is None:
            fail("logprob_token_ids", "needs logprobs")
        if len(self.prompt) * self.num_sequences > MAX_CHOICES:
            fail("prompt", f"times n asks for more than {MAX_CHOICES} answers", "array_above_max_length")
        return self


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages as chat would render them."""

    prompt: Annotated[str | None, string(20_000_000)] = None
    messages: Annotated[list[dict[str, Any]] | None, checked_by(normal_messages)] = None
    tools: Annotated[tuple[Tool, ...], checked_by(normal_tools)] = ()
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    add_special_tokens: Flag | None = None  # None = true for a prompt, false for messages
    chat_template: Annotated[str | None, string(1_000_000)] = None
    chat_template_kwargs: Annotated[dict[str, Any], checked_by(_template_kwargs)] = Field(default_factory=dict)
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            fail("prompt", "or messages is required, and only one of them", "missing_required_parameter")
        return self

    check_template: ClassVar[Callable[..., None]] = ChatCompletionRequest.check_template


class DetokenizeRequest(Body):
    """POST /detokenize: token ids -> text."""

    tokens: Annotated[tuple[int, ...], checked_by(lambda value: _ids(value, "tokens") if value != [] else ())]
