"""The request bodies: every field with its default, its range and its error.

    request = ChatCompletionRequest.parse(body)     # or a WorkerError that names the field
    request.ignored_fields()                        # what was accepted without meaning anything here

null means absent, for every field. A field that is known and impossible here is refused by name (UNSUPPORTED);
one that changes nothing (`store`, `user`, ...) is checked and kept; an unknown one is kept and reported.
Limits that depend on the model (context, vocabulary) are applied by worker.sampling.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from worker.protocol.body import Body, Refusal
from worker.protocol.fields import Flag, checked_by, choice, integer, string, wrong_type
from worker.protocol.generation import Generation, logprobs_count
from worker.protocol.messages import MAX_MESSAGES, normal_messages
from worker.protocol.tools import (
    Tool,
    ToolChoice,
    normal_choice,
    normal_function_call,
    normal_functions,
    normal_tools,
)
from worker.protocol.validation import fail, kind

MAX_PROMPTS = 1024
MAX_IDS = 2_000_000  # of a prompt; the context is the real limit, and known later
MAX_IDS_TO_TEXT = 250_000
MAX_TEXT_CHARS = 20_000_000
MAX_CHOICES = 1024  # prompts x n, or x best_of
_CHAT_ONLY = (
    "messages tools tool_choice functions function_call chat_template chat_template_kwargs continue_final_message "
    "top_logprobs max_completion_tokens"
).split()
_CHAT, _COMPLETIONS = "belongs to /v1/chat/completions", "belongs to /v1/completions"
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Names that the template's renderer sets itself.
RESERVED_TEMPLATE_KWARGS = frozenset(
    "messages tools documents chat_template tokenize add_generation_prompt continue_final_message raise_exception "
    "strftime_now return_dict return_tensors bos_token eos_token pad_token unk_token".split()
)


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


class TemplateFields(Body):
    """How messages become a prompt."""

    tools: Annotated[tuple[Tool, ...], checked_by(normal_tools)] = ()
    add_generation_prompt: Flag = True  # false where continue_final_message is true and nothing else is said
    continue_final_message: Flag = False
    documents: Annotated[list[dict[str, Any]] | None, checked_by(_documents)] = None
    chat_template: Annotated[str | None, string(1_000_000)] = None
    chat_template_kwargs: Annotated[dict[str, Any], checked_by(_template_kwargs)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _continue(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"add_generation_prompt": False, **given} if given.get("continue_final_message") is True else given

    @model_validator(mode="after")
    def _check_template_fields(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            fail("continue_final_message", "cannot be combined with add_generation_prompt")
        return self

    @property
    def all_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt shows."""
        return self.tools

    @property
    def may_call(self) -> bool:
        """Whether an answer may call one of them."""
        return bool(self.tools)

    def check_template(self, *, trusted: bool) -> None:
        """Refuse a template of the client's own unless the server was told to trust them."""
        if self.chat_template is not None and not trusted:
            text = "is not accepted by this server (TRUST_REQUEST_CHAT_TEMPLATE is off)"
            fail("chat_template", text, "unsupported_parameter")


class ChatCompletionRequest(TemplateFields, Generation):
    elsewhere: ClassVar[dict[str, Refusal]] = {"prompt": ((), _COMPLETIONS), "suffix": (("",), _COMPLETIONS)}
    longest: ClassVar[dict[str, int]] = {"messages": MAX_MESSAGES}

    messages: Annotated[list[dict[str, Any]], checked_by(normal_messages)]
    max_tokens: Annotated[int | None, integer(1)] = None
    max_completion_tokens: Annotated[int | None, integer(1)] = None
    logprobs: Flag = False
    top_logprobs: Annotated[int | None, checked_by(logprobs_count)] = None
    add_special_tokens: Flag = False

    functions: Annotated[tuple[Tool, ...], checked_by(normal_functions)] = ()
    tool_choice: Any = None
    function_call: Any = None
    parallel_tool_calls: Flag = True

    reasoning_effort: Annotated[str | None, choice(*REASONING_EFFORTS)] = None
    include_reasoning: Flag = True

    @property
    def all_tools(self) -> tuple[Tool, ...]:
        """`tools`, or the legacy `functions`."""
        return self.tools or self.functions

    @property
    def may_call(self) -> bool:
        return self.choice_of_tools.kind != "none"

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
        if (self.tools or self.tool_choice is not None) and self.legacy_functions:
            fail("functions" if self.functions else "function_call", "cannot be combined with tools and tool_choice")
        _ = self.choice_of_tools
        return self


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
        wanted = "a string or an array of token ids" if path.startswith("prompt") else "an array of token ids"
        fail(path, f"must be {wanted}, got {kind(value)}", "invalid_type")
    if not value:
        fail(path, "must not be empty", "empty_array")
    if set(map(type, value)) != {int}:
        index = next(index for index, item in enumerate(value) if type(item) is not int)
        fail(f"{path}[{index}]", f"must be a token id, got {kind(value[index])}", "invalid_type")
    if min(value) < 0:
        fail(path, "must hold token ids, which are never negative", "integer_below_min_value")
    return tuple(value)


class CompletionRequest(Generation):
    elsewhere: ClassVar[dict[str, Refusal]] = dict.fromkeys(_CHAT_ONLY, (("none", False, {}, []), _CHAT))
    longest: ClassVar[dict[str, int]] = {"prompt": MAX_IDS}

    prompt: Annotated[tuple[str | tuple[int, ...], ...], checked_by(_prompts)]
    max_tokens: Annotated[int, integer(0)] = 16
    logprobs: Annotated[int | None, checked_by(logprobs_count)] = None
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


class TokenizeRequest(TemplateFields):
    """POST /tokenize: a prompt, or messages as chat would render them."""

    longest: ClassVar[dict[str, int]] = {"messages": MAX_MESSAGES}

    prompt: Annotated[str | None, string(MAX_TEXT_CHARS)] = None
    messages: Annotated[list[dict[str, Any]] | None, checked_by(normal_messages)] = None
    add_special_tokens: Flag | None = None  # None = true for a prompt, false for messages
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            fail("prompt", "or messages is required, and only one of them", "missing_required_parameter")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize: token ids -> text."""

    longest: ClassVar[dict[str, int]] = {"tokens": MAX_IDS_TO_TEXT}

    tokens: Annotated[tuple[int, ...], checked_by(lambda value: _ids(value, "tokens") if value != [] else ())]
