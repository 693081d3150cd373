"""Completions: a stream of chunks, or one body. Choice i answers prompt i // n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.answers.base import Frame
from worker.logprobs import CompletionLogprobs, joined
from worker.pipeline import Step
from worker.prompts import Prompt
from worker.protocol import responses, sse
from worker.protocol.chunks import Chunks
from worker.protocol.requests import CompletionRequest
from worker.tokenizer import Tokenizer

# An echoed prompt of more tokens goes out in several chunks: the platform takes 1 MB at a time.
ECHO_TOKENS = 2048


@dataclass
class Part:
    """What is new of a choice: of its echoed prompt, of its answer, or of both."""

    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # blocks; [] where none were asked for
    token_ids: list[int] = field(default_factory=list)

    def __add__(self, later: Part) -> Part:
        return Part(self.text + later.text, self.logprobs + later.logprobs, self.token_ids + later.token_ids)


class CompletionRules:
    """Turns steps into parts: echoes the prompt first, appends the suffix at the end."""

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[Prompt],
        frame: Frame,
        tokenizer: Tokenizer,
        *,
        append_suffix: bool,
    ) -> None:
        self.request = request
        self.frame = frame
        self.prompts = prompts
        self._tokenizer = tokenizer
        self._suffix = request.suffix or "" if append_suffix else ""
        self._skipped = tokenizer.special_ids if request.skip_special_tokens else frozenset()
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.request.n]

    def echoed(self, index: int, step: Step) -> list[Part]:
        """The prompt of a choice, with its logprobs, in parts of a bounded size."""
        prompt = self.prompt(index)
        ids = list(prompt.ids)
        hidden = frozenset(self._tokenizer.prefix_ids) if prompt.text is not None else self._skipped
        positions = step.prompt_logprobs or (None,) * len(ids)
        if len(ids) <= ECHO_TOKENS:
            return [Part(self.echo_text(prompt), self._block(index, ids, positions, 0, hidden))]
        parts, start = [], 0
        for end in range(ECHO_TOKENS, len(ids) + ECHO_TOKENS, ECHO_TOKENS):
            block = self._block(index, ids[start:end], positions[start:end], 0, hidden)
            parts.append(Part("", block))
            start = end
        text = self.echo_text(prompt)
        size = -(-len(text) // len(parts))
        for place, part in enumerate(parts):
            part.text = text[place * size : (place + 1) * size]
        return parts

    def part(self, index: int, step: Step) -> Part:
        block = self._block(index, step.token_ids, step.logprobs, self.frame.num_extra, self._skipped)
        text = step.content + (self._suffix if step.finish is not None else "")
        return Part(text, block if step.token_ids else [], list(step.token_ids))

    def echo_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids, skip_special_tokens=self.request.skip_special_tokens)

    def prompt_logprobs(self, step: Step) -> list[dict[str, Any] | None] | None:
        form, count = self.frame.prompt_form, self.request.prompt_logprobs
        if form is None or count is None or step.prompt_logprobs is None:
            return None
        return form.prompt(step.prompt_logprobs, count)

    def _block(
        self, index: int, ids: Sequence[int], positions: Sequence[Any], num_extra: int, hidden: frozenset[int]
    ) -> list[dict[str, Any]]:
        if self.frame.form is None:
            return []
        state = self._logprobs.setdefault(index, CompletionLogprobs(self.frame.form))
        return [state.block(ids, positions, num_extra=num_extra, hidden=hidden)]


class StreamedCompletion:
    """(prompt and) text ... -> finish with the last text -> usage -> [DONE]"""

    def __init__(self, rules: CompletionRules) -> None:
        options = rules.request.stream_options
        self._rules = rules
        self._frame = rules.frame
        self._include_usage = rules.frame.include_usage
        self._running_usage = options is not None and options.continuous_usage_stats
        self._chunks = Chunks(rules.frame.head, "text_completion", self._include_usage)
        self._started: set[int] = set()

    def step(self, index: int, step: Step) -> None:
        rules, part = self._rules, self._rules.part
        request = rules.request
        extra: dict[str, Any] = {}
        parts = []
        if index not in self._started:
            self._started.add(index)
            parts = rules.echoed(index, step) if request.echo else []
            extra = {
                "prompt_token_ids": list(rules.prompt(index).ids) if request.return_token_ids else None,
                "prompt_text": rules.prompt(index).text if request.return_prompt_text else None,
            }
        last = part(index, step)
        if len(parts) == 1:
            last = parts.pop() + last
        for echoed in parts:
            self._send(index, echoed, None, extra)
            extra = {}
        wants_tokens = last.logprobs or (request.return_token_ids and last.token_ids)
        if last.text or wants_tokens or extra or step.finish is not None:
            self._send(index, last, step, extra)

    def close(self) -> None:
        if self._include_usage:
            self._frame.send(sse.event(self._chunks.usage(self._frame.usage())))
        self._frame.send(sse.DONE)

    def _send(self, index: int, part: Part, step: Step | None, extra: dict[str, Any]) -> None:
        finish = None if step is None else step.finish
        choice = responses.completion_choice(
            index,
            part.text,
            None if finish is None else ("length" if finish.reason == "length" else "stop"),
            logprobs=joined(part.logprobs) if part.logprobs else None,
            stop_reason=None if finish is None else finish.stop_reason,
            token_ids=part.token_ids if self._rules.request.return_token_ids else None,
            **extra,
        )
        usage = self._frame.usage() if self._running_usage else None
        self._frame.send(sse.event(self._chunks.chunk(choice, usage=usage)))


@dataclass
class _Choice:
    parts: list[Part] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    finish_reason: responses.FinishReason = "stop"
    stop_reason: int | str | None = None


class WholeCompletion:
    def __init__(self, rules: CompletionRules) -> None:
        self._rules = rules
        self._choices = [_Choice() for _ in range(len(rules.prompts) * rules.request.n)]

    def step(self, index: int, step: Step) -> None:
        choice, rules = self._choices[index], self._rules
        if not choice.parts:
            choice.prompt_logprobs = rules.prompt_logprobs(step)
            if rules.request.echo:
                choice.parts += rules.echoed(index, step)
        choice.parts.append(rules.part(index, step))
        if step.finish is not None:
            choice.finish_reason = "length" if step.finish.reason == "length" else "stop"
            choice.stop_reason = step.finish.stop_reason

    def close(self) -> None:
        frame = self._rules.frame
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        frame.send(responses.completion(frame.head, choices, frame.usage()))

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        request, prompt = self._rules.request, self._rules.prompt(index)
        return responses.completion_choice(
            index,
            "".join(part.text for part in choice.parts),
            choice.finish_reason,
            logprobs=joined(block for part in choice.parts for block in part.logprobs)
            if self._rules.frame.form is not None
            else None,
            stop_reason=choice.stop_reason,
            token_ids=[token_id for part in choice.parts for token_id in part.token_ids]
            if request.return_token_ids
            else None,
            prompt_token_ids=list(prompt.ids) if request.return_token_ids else None,
            prompt_logprobs=choice.prompt_logprobs,
            prompt_text=prompt.text if request.return_prompt_text else None,
        )
