"""Runs the sequences of one request in the engine and hands on, step by step, what each choice has to say.

    generation = Generation(client, candidates, timing)
    await generation.run(on_step)           # on_step(choice index, Step); WorkerError where the engine gives up
    generation.abort()                      # synchronous, at any time, any number of times
    generation.usage                        # so far

`best_of` and beam search first make more candidates than they show: `ranked` replays the best of them. Knows nothing
of OpenAI's bodies.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.client import EngineClient
from engine.messages import FinishReason, Request, RequestError, SequenceOutput
from worker.errors import BadRequest, ContextLength, InternalError, RateLimited, Unavailable, WorkerError
from worker.pipeline import OutputPipeline, Step
from worker.protocol.responses import Usage

OnStep = Callable[[int, Step], None]


@dataclass
class Candidate:
    """One candidate: what the engine gets, and what becomes of its output."""

    request: Request
    pipeline: OutputPipeline
    prompt_index: int = 0
    grammar_param: str | None = None  # the request's field that the grammar comes from
    num_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None

    def take(self, output: SequenceOutput, cached_tokens: int | None) -> Step:
        """Runs what the engine made through the pipeline, and counts it."""
        if cached_tokens is not None:
            self.cached_tokens = cached_tokens
        step = self.pipeline.feed(output)
        self.num_tokens += len(step.token_ids)
        self.reasoning_tokens += step.reasoning_tokens
        if step.finish is not None:
            self.finish_reason = step.finish.reason
        return step


@dataclass
class Timing:
    """Of one request, in seconds of time.monotonic()."""

    started: float
    first_token: float | None = None
    last_token: float | None = None
    # Of the first choice, as the engine has measured it; None where it has not.
    queue_s: float | None = None
    prefill_s: float | None = None
    between: list[float] = field(default_factory=list)  # of the first choice: a token's share, step by step
    _last_of_first_choice: float | None = None

    def note(self, index: int, num_tokens: int, output: SequenceOutput | None = None) -> None:
        """Choice `index` has new tokens, now; `output`: the engine's, where it made them just now."""
        if index == 0 and output is not None and output.queue_s is not None:
            self.queue_s, self.prefill_s = output.queue_s, output.prefill_s
        now = self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = now
        if index == 0:
            if self._last_of_first_choice is not None:
                self.between += [(now - self._last_of_first_choice) / num_tokens] * num_tokens
            self._last_of_first_choice = now


class Generation:
    def __init__(
        self, client: EngineClient, candidates: Sequence[Candidate], timing: Timing, stream_interval: int = 1
    ) -> None:
        """Choice i is `candidates[i]`. `stream_interval`: least number of tokens a step."""
        self._client = client
        self.candidates = list(candidates)
        self._interval = stream_interval
        self._live: set[str] = set()
        self.timing = timing

    async def run(self, on_step: OnStep) -> None:
        """Ends when all sequences have; the others are aborted as soon as one fails."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, candidate in enumerate(self.candidates):
                    group.create_task(self._follow(index, candidate, on_step))
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            self.abort()

    def abort(self) -> None:
        for request_id in self._live:
            self._client.abort(request_id)
        self._live.clear()

    @property
    def usage(self) -> Usage:
        return usage_of(self.candidates)

    async def _follow(self, index: int, candidate: Candidate, on_step: OnStep) -> None:
        request_id = candidate.request.id
        self._live.add(request_id)
        waiting: Step | None = None
        async for output in self._client.submit(candidate.request):
            if output.finish in (FinishReason.ERROR, FinishReason.ABORT):
                self._live.discard(request_id)
                raise engine_error(output, candidate.grammar_param)
            step = candidate.take(output, output.cached_tokens)
            if step.token_ids:
                self.timing.note(index, len(step.token_ids), output)
            if step.finish is not None:
                if output.finish is None:  # a stop string: only this side has seen it
                    self._client.abort(request_id)
                self._live.discard(request_id)
            first = candidate.num_tokens == len(step.token_ids)
            waiting = step if waiting is None else waiting + step
            if first or waiting.finish is not None or len(waiting.token_ids) >= self._interval:
                on_step(index, waiting)
                waiting = None
            if step.finish is not None:
                return
        raise InternalError("the engine ended an answer without saying why")


async def ranked(generation: Generation, num_prompts: int, n: int, on_step: OnStep) -> None:
    """best_of: runs all candidates, then replays for each prompt the n with the highest mean logprob, best first."""
    recorded: list[list[Step]] = [[] for _ in generation.candidates]
    await generation.run(lambda index, step: recorded[index].append(step))
    num_candidates = len(recorded) // num_prompts
    for prompt in range(num_prompts):
        candidates = range(prompt * num_candidates, (prompt + 1) * num_candidates)
        best = sorted(candidates, key=lambda index: -mean_logprob(recorded[index]))[:n]
        for place, index in enumerate(best):
            for step in recorded[index]:
                on_step(prompt * n + place, step)


def usage_of(candidates: Sequence[Candidate]) -> Usage:
    """Prompt tokens count once a prompt; cached ones are those that no sequence of this request had to compute."""
    prompts: dict[int, int] = {}
    cached: dict[int, int] = {}
    for candidate in candidates:
        prompt = candidate.prompt_index
        prompts[prompt] = len(candidate.request.prompt_ids)
        if candidate.cached_tokens is not None:
            cached[prompt] = min(cached.get(prompt, candidate.cached_tokens), candidate.cached_tokens)
    return Usage(
        prompt_tokens=sum(prompts.values()),
        completion_tokens=sum(candidate.num_tokens for candidate in candidates),
        cached_tokens=sum(cached.values()),
        reasoning_tokens=sum(candidate.reasoning_tokens for candidate in candidates),
    )


def mean_logprob(steps: Sequence[Step]) -> float:
    """Of the tokens of one candidate, which must come with their logprobs."""
    values = [position.logprobs[0] for step in steps for position in step.logprobs]
    return math.fsum(values) / len(values) if values else -math.inf


def engine_error(output: SequenceOutput, grammar_param: str | None) -> WorkerError:
    """What a client is told where the engine gave a sequence up; `grammar_param` is to blame if its grammar failed."""
    error = output.error or RequestError("aborted", "the server gave up this request before it was answered")
    match error.code:
        case "queue_full":
            return RateLimited(error.message, retry_after_s=error.retry_after_s)
        case "prompt_too_long":
            return ContextLength(error.message)
        case "grammar_failed":
            return BadRequest(error.message, param=grammar_param, code="invalid_grammar")
        case "nothing_allowed":
            return BadRequest(error.message, param=grammar_param)
        case "engine_dead" | "aborted":
            return Unavailable(error.message)
        case _:
            return InternalError(error.message)


def first_failure(failures: BaseException) -> BaseException:
    """The one failure of a group to tell: a bug before what the engine said."""
    while isinstance(failures, BaseExceptionGroup):
        inner: tuple[BaseException, ...] = failures.exceptions
        failures = next((error for error in inner if not isinstance(error, WorkerError)), inner[0])
    return failures
