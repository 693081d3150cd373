"""Chat completions: a stream of chunks, or one body."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from worker.answers.base import Frame
from worker.parsers.base import Content, Delta, Reasoning, ToolCallArgs, ToolCallStart
from worker.pipeline import Step
from worker.prompts import Prompt
from worker.protocol import chunks, responses, sse
from worker.protocol.chunks import Chunks
from worker.protocol.requests import ChatCompletionRequest
from worker.protocol.responses import FinishReason


class ChatRules:
    """What of a choice's deltas a client is told, and under which finish reason."""

    def __init__(self, request: ChatCompletionRequest, frame: Frame, role: str) -> None:
        self.request = request
        self.frame = frame
        self.role = role
        self.echo = _echo(request, role) if request.echo else ""
        self._arguments: dict[int, list[str]] = {}  # of the last call, by the choices that called a tool

    def shown(self, index: int, deltas: tuple[Delta, ...]) -> Iterator[Delta]:
        for delta in deltas:
            match delta:
                case Reasoning() if not self.request.include_reasoning:
                    continue
                case ToolCallStart(call) | ToolCallArgs(call) if call > 0 and not self.several_calls:
                    continue
                case ToolCallStart():
                    self._arguments[index] = []
                case ToolCallArgs(_, fragment):
                    self._arguments[index].append(fragment)
            yield delta

    @property
    def must_call(self) -> bool:
        return self.request.choice_of_tools.forces

    @property
    def several_calls(self) -> bool:
        return self.request.parallel_tool_calls and not self.request.legacy_functions

    def hides_tokens(self, step: Step) -> bool:
        """Hidden reasoning hides its tokens, too."""
        return step.reasoning_tokens > 0 and not self.request.include_reasoning

    def logprobs(self, step: Step) -> list[dict[str, Any]] | None:
        form = self.frame.form
        if form is None or self.hides_tokens(step):
            return None
        return form.chat(step.logprobs, self.frame.num_extra)

    def token_ids(self, step: Step) -> list[int] | None:
        return list(step.token_ids) if self.request.return_token_ids and not self.hides_tokens(step) else None

    def finish_reason(self, index: int, step: Step) -> FinishReason | None:
        if step.finish is None:
            return None
        if step.finish.reason == "length":
            return "length"
        # A tool that the client named was no choice of the model's; a call that broke off is none to be run.
        named = self.request.choice_of_tools.kind == "named"
        if index not in self._arguments or named or self._is_cut(index):
            return "stop"
        return "function_call" if self.request.legacy_functions else "tool_calls"

    def _is_cut(self, index: int) -> bool:
        """Whether the arguments of the last call end before they are whole."""
        text = "".join(self._arguments[index])
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return error.pos >= len(text)
        return False


class StreamedChat:
    """role (once a choice) -> echo -> deltas ... -> finish with the last delta -> usage -> [DONE]

    The role's chunk has a content: "" before text, null before calls and thoughts. Where that is not known from the
    request, a choice's steps wait until there is something to show.
    """

    def __init__(self, rules: ChatRules, prompt: Prompt) -> None:
        options = rules.request.stream_options
        self._rules = rules
        self._prompt = prompt
        self._frame = rules.frame
        self._include_usage = rules.frame.include_usage
        self._running_usage = options is not None and options.continuous_usage_stats
        self._chunks = Chunks(rules.frame.head, include_usage=self._include_usage)
        self._begun: set[int] = set()  # choices whose role was told
        self._waiting: dict[int, list[Step]] = {}  # steps of the others

    def step(self, index: int, step: Step) -> None:
        shown = list(self._rules.shown(index, step.deltas))
        if index not in self._begun:
            if not (shown or step.finish or self._rules.must_call or self._rules.echo):
                self._waiting.setdefault(index, []).append(step)
                return
            self._begin(index, shown[0] if shown else None)
            for earlier in self._waiting.pop(index, ()):
                self._tell(index, earlier, [])
        self._tell(index, step, shown)

    def _tell(self, index: int, step: Step, shown: list[Delta]) -> None:
        rules = self._rules
        deltas = [self._delta(delta) for delta in shown]
        logprobs, token_ids = rules.logprobs(step), rules.token_ids(step)
        if not deltas and step.finish is None and not logprobs and not token_ids:
            return
        for place, delta in enumerate(deltas or [{}]):
            last = place == max(0, len(deltas) - 1)
            choice = chunks.delta_choice(
                index,
                delta,
                rules.finish_reason(index, step) if last else None,
                logprobs=logprobs if place == 0 else None,
                stop_reason=step.finish.stop_reason if last and step.finish is not None else None,
                token_ids=token_ids if place == 0 else None,
            )
            self._send(choice)

    def close(self) -> None:
        if self._include_usage:
            self._frame.send(sse.event(self._chunks.usage(self._frame.usage())))
        self._frame.send(sse.DONE)

    def _begin(self, index: int, shown: Delta | None) -> None:
        """Tells the role of a choice that shows this first, or nothing at all."""
        request, rules = self._rules.request, self._rules
        has_text = bool(rules.echo) or isinstance(shown, Content) or (shown is None and not rules.must_call)
        first = not self._begun
        self._begun.add(index)
        self._send(
            chunks.delta_choice(index, chunks.role_delta(rules.role, "" if has_text else None)),
            prompt_token_ids=list(self._prompt.ids) if first and request.return_token_ids else None,
            prompt_text=self._prompt.text if first and request.return_prompt_text else None,
        )
        if rules.echo:
            self._send(chunks.delta_choice(index, chunks.content_delta(rules.echo)))

    def _send(self, choice: dict[str, Any], **extra: Any) -> None:
        usage = self._frame.usage() if self._running_usage else None
        self._frame.send(sse.event(self._chunks.chunk(choice, usage=usage, **extra)))

    def _delta(self, delta: Delta) -> dict[str, Any]:
        legacy = self._rules.request.legacy_functions
        match delta:
            case Content(text):
                return chunks.content_delta(text)
            case Reasoning(text):
                return chunks.reasoning_delta(text)
            case ToolCallStart(index, call_id, name):
                return chunks.function_call_delta(name) if legacy else chunks.tool_call_delta(index, call_id, name)
            case ToolCallArgs(index, fragment):
                if legacy:
                    return chunks.function_call_delta(fragment=fragment)
                return chunks.tool_arguments_delta(index, fragment)


@dataclass
class _Choice:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, fragments of the arguments
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop_reason: int | str | None = None


class WholeChat:
    def __init__(self, rules: ChatRules, prompt: Prompt) -> None:
        self._rules = rules
        self._prompt = prompt
        self._choices = [_Choice() for _ in range(rules.request.n)]
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None

    def step(self, index: int, step: Step) -> None:
        choice, rules = self._choices[index], self._rules
        for delta in rules.shown(index, step.deltas):
            match delta:
                case Content(text):
                    choice.content.append(text)
                case Reasoning(text):
                    choice.reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    choice.calls.append((call_id, name, []))
                case ToolCallArgs(call, fragment):
                    choice.calls[call][2].append(fragment)
        choice.logprobs += rules.logprobs(step) or []
        choice.token_ids += rules.token_ids(step) or []
        if step.prompt_logprobs is not None and self._prompt_logprobs is None and rules.frame.prompt_form is not None:
            count = rules.request.prompt_logprobs
            self._prompt_logprobs = rules.frame.prompt_form.prompt(step.prompt_logprobs, count or 0)
        if step.finish is not None:
            choice.finish_reason = rules.finish_reason(index, step) or "stop"
            choice.stop_reason = step.finish.stop_reason

    def close(self) -> None:
        request, frame = self._rules.request, self._rules.frame
        body = responses.chat_completion(
            frame.head,
            [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            frame.usage(),
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=list(self._prompt.ids) if request.return_token_ids else None,
            prompt_text=self._prompt.text if request.return_prompt_text else None,
        )
        frame.send(body)

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        rules = self._rules
        calls = [(call_id, name, "".join(fragments)) for call_id, name, fragments in choice.calls]
        legacy = rules.request.legacy_functions
        content = rules.echo + "".join(choice.content)
        message = responses.chat_message(
            content if content or not (calls or choice.reasoning or rules.must_call) else None,
            role=rules.role,
            reasoning="".join(choice.reasoning),
            tool_calls=[responses.tool_call(*call) for call in calls] if not legacy else None,
            function_call={"name": calls[0][1], "arguments": calls[0][2]} if legacy and calls else None,
        )
        return responses.chat_choice(
            index,
            message,
            choice.finish_reason,
            logprobs=choice.logprobs if rules.frame.form is not None else None,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if rules.request.return_token_ids else None,
        )


def _echo(request: ChatCompletionRequest, role: str) -> str:
    """The last message's text, if its role is the answer's."""
    last = request.messages[-1]
    content = last.get("content") if last["role"] == role else None
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
