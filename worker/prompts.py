"""A request's prompt, from messages, text or ids, to the token ids that the engine gets.

Chats are rendered by the template and encoded piece by piece of its own control tokens; raw prompts are encoded as
they are, control tokens that they spell included. What is long is encoded in a thread; what is certainly too long
for the context is refused before it is encoded. Knows nothing of sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from templates import CallWriter, ChatTemplates, Rendered, Stop, TemplateError, calls_as_json
from worker.errors import BadRequest, ContextLength
from worker.fim import fim_format
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest, TemplateFields, TokenizeRequest
from worker.protocol.tools import Tool
from worker.protocol.validation import fail
from worker.sampling import Model, check_token_ids, truncated
from worker.settings import Settings
from worker.tokenizer import Tokenizer

# About 5 ms of encoding; beyond it the event loop would make other streams wait.
INLINE_CHARS = 10_000
# What is encoded even where the context is much smaller: a text that does not fit may be measured, or cut.
UNFITTING_CHARS = 1_000_000
MESSAGE_CHARS = 50  # what a message costs besides
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    text: str | None = None  # what was encoded; None where the client gave ids, or where they were cut
    previous: int | None = None  # the token that the answer's text goes on from; None: it is a text of its own
    rendered: Rendered | None = None  # of a chat
    stop: Stop | None = None  # what ends a turn by the request's own template; None: the model's template was used


class PromptBuilder:
    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        model: Model,
        settings: Settings,
        write_calls: CallWriter = calls_as_json,
    ) -> None:
        """`write_calls`: the model's form of tool calls, for templates that pass over those of a history."""
        self.tokenizer = tokenizer
        self.templates = templates
        self._model = model
        self._settings = settings
        self._write_calls = write_calls
        self._fim = fim_format(tokenizer)

    @property
    def fills_in(self) -> bool:
        """Whether `suffix` becomes part of the prompt; otherwise it is for the caller to append it."""
        return self._fim is not None

    async def chat(self, request: ChatCompletionRequest) -> Prompt:
        """Raises BadRequest (what the template itself refuses included) or ContextLength."""
        request.check_template(trusted=self._settings.trust_request_chat_template)
        prompt = await self._render_and_encode(request, request.messages, request.add_special_tokens)
        if (ids := truncated(prompt.ids, request, self._model)) != prompt.ids:
            prompt = replace(prompt, ids=ids, text=None)
        check_token_ids("messages", ids, self._model.vocab_size)  # a tokenizer may have more than the model
        continues = request.continue_final_message or not request.add_generation_prompt
        return replace(prompt, previous=self._last_text_token(ids) if continues else None)

    async def completions(self, request: CompletionRequest) -> list[Prompt]:
        """One for each of the request's prompts."""
        num_chars = sum(len(prompt) for prompt in request.prompt if isinstance(prompt, str))
        num_chars += len(request.suffix or "") * len(request.prompt)
        return [await self._completion(request, prompt, num_chars) for prompt in request.prompt]

    async def tokenize(self, request: TokenizeRequest) -> Prompt:
        """Of a prompt, or of messages as chat would render them."""
        request.check_template(trusted=self._settings.trust_request_chat_template)
        if request.messages is not None:
            return await self._render_and_encode(request, request.messages, request.add_special_tokens or False)
        assert request.prompt is not None
        self._refuse_if_endless(len(request.prompt), "prompt")
        return await self._encode_raw(request.prompt, request.add_special_tokens is not False, len(request.prompt))

    async def _completion(self, request: CompletionRequest, given: str | tuple[int, ...], num_chars: int) -> Prompt:
        """`num_chars`: of all prompts of the request together."""
        if request.suffix is not None and self._fim is not None:
            prompt = await self._fill_in(request, given, request.suffix, num_chars)
        elif isinstance(given, str):
            if request.truncate_prompt_tokens is None:
                self._refuse_if_hopeless(len(given), "prompt")
            else:
                self._refuse_if_endless(len(given), "prompt")
            prompt = await self._encode_raw(given, request.add_special_tokens, num_chars)
        else:
            prompt = Prompt(given)
        check_token_ids("prompt", prompt.ids, self._model.vocab_size)
        if (ids := truncated(prompt.ids, request, self._model)) != prompt.ids:
            prompt = replace(prompt, ids=ids, text=None)
        return replace(prompt, previous=self._last_text_token(ids))

    async def _fill_in(
        self, request: CompletionRequest, given: str | tuple[int, ...], suffix: str, num_chars: int
    ) -> Prompt:
        assert self._fim is not None
        if not isinstance(given, str):
            raise BadRequest("suffix needs a prompt of text, not of token ids", param="suffix")
        pieces = self._fim.pieces(given, suffix)
        prefix = self.tokenizer.prefix_ids if request.add_special_tokens else ()
        ids = await _off_loop(num_chars, lambda: self.tokenizer.encode_pieces(pieces))
        return Prompt((*prefix, *ids), given)

    async def _encode_raw(self, text: str, add_special_tokens: bool, num_chars: int) -> Prompt:
        encode = self.tokenizer.encode
        ids = await _off_loop(num_chars, lambda: encode(text, add_special_tokens=add_special_tokens))
        return Prompt(tuple(ids), text)

    async def _render_and_encode(
        self, request: TemplateFields, messages: list[dict[str, Any]], add_special_tokens: bool
    ) -> Prompt:
        cut = getattr(request, "truncate_prompt_tokens", None) is not None
        num_chars = sum(map(_num_chars, messages))
        (self._refuse_if_endless if cut else self._refuse_if_hopeless)(num_chars, "messages")

        def run() -> Prompt:
            rendered, stop = self._render(request, messages)
            if not cut:
                self._refuse_if_hopeless(len(rendered.text), "messages")
            ids = self.tokenizer.encode_pieces(rendered.pieces)
            prefix = self.tokenizer.prefix_ids if add_special_tokens else ()
            return Prompt((*prefix, *ids), rendered.text, rendered=rendered, stop=stop)

        # A client's own template may take its time whatever its input's size.
        num_chars += MESSAGE_CHARS * len(messages)
        return await _off_loop(num_chars if request.chat_template is None else INLINE_CHARS + 1, run)

    def _render(self, request: TemplateFields, messages: list[dict[str, Any]]) -> tuple[Rendered, Stop | None]:
        """The prompt, and what ends a turn where the template is the request's own."""
        templates = self.templates
        try:
            if request.chat_template is not None:
                templates = templates.replaced(request.chat_template)
            rendered = self._rendered(templates, request, messages, request.all_tools)
            if rendered.react and not request.may_call:  # a form that asks for calls
                rendered = self._rendered(templates, request, messages, ())
            return rendered, None if templates is self.templates else templates.stop
        except TemplateError as error:
            raise BadRequest(str(error), param=error.param or "messages", code="template_error") from None

    def _rendered(
        self, templates: ChatTemplates, request: TemplateFields, messages: list[dict[str, Any]], tools: tuple[Tool, ...]
    ) -> Rendered:
        if self._settings.exclude_tools_when_none and not request.may_call:
            tools = ()
        return templates.render(
            messages,
            tools=[tool.source for tool in tools] or None,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=self._template_kwargs(request),
            allow_control_tokens=self._settings.allow_control_tokens,
            write_calls=self._write_calls,
        )

    def _template_kwargs(self, request: TemplateFields) -> dict[str, Any]:
        kwargs = {**self._settings.default_chat_template_kwargs, **request.chat_template_kwargs}
        effort = getattr(request, "reasoning_effort", None)
        return kwargs if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none", **kwargs}

    def _refuse_if_endless(self, num_chars: int, param: str) -> None:
        """Text that takes too long to encode, though nobody wants it to fit the context: it is measured or cut."""
        limit = max(UNFITTING_CHARS, self._most_chars)
        if num_chars > limit:
            fail(param, f"must be at most {limit} characters long, got {num_chars}", "string_above_max_length")

    @property
    def _most_chars(self) -> int:
        """More text than this never fits the context."""
        return self._model.max_model_len * self.tokenizer.longest_token_chars

    def _refuse_if_hopeless(self, num_chars: int, param: str) -> None:
        """Text that is too long even if every token were the longest there is."""
        if num_chars > self._most_chars:
            raise ContextLength(
                f"This model's maximum context length is {self._model.max_model_len} tokens, and the {param} of "
                f"{num_chars} characters cannot fit. Shorten the {param}.",
                param=param,
            )

    def _last_text_token(self, ids: tuple[int, ...]) -> int | None:
        return next((token_id for token_id in reversed(ids) if token_id not in self.tokenizer.special_ids), None)


def _num_chars(message: dict[str, Any]) -> int:
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content) if isinstance(content, list) else 0


async def _off_loop(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
