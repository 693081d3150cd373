"""Beam search over an engine that only draws tokens.

Every step asks the engine, for each living beam, for one token and the 2 x width best logprobs after it; the prefix
cache makes the prompt and the beam so far almost free. A beam ends at a stop token, a stop string or its length; its
score is the sum of its logprobs (of the model's own distribution) / its length ** length_penalty.

    early_stopping = True     ends when `width` beams have ended
                     False    ends when no living beam, at its present length, beats the worst of them
                     "never"  ends when none could, at any length
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.client import EngineClient
from engine.grammar import GrammarError
from engine.messages import FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from worker.beam_grammar import BeamGrammar
from worker.detokenizer import Detokenizer
from worker.errors import BadRequest
from worker.generation import Candidate, OnStep, Timing, engine_error, first_failure, usage_of
from worker.protocol.generation import Generation
from worker.protocol.responses import Usage
from worker.protocol.validation import fail

# What beam search, which draws nothing, cannot honour: field and the value that asks for nothing.
_NOT_WITH_BEAMS = {
    "logit_bias": (),
    "allowed_token_ids": None,
    "bad_words": (),
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": None,
}


def refuse_beside_beams(request: Generation) -> None:
    """Refuses a request with beam search for what the search would ignore. Raises BadRequest."""
    for name, nothing in _NOT_WITH_BEAMS.items():
        if getattr(request, name) not in (nothing, 1.0 if name == "repetition_penalty" else nothing):
            fail(name, "cannot be combined with use_beam_search")


@dataclass(frozen=True)
class Beam:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0  # sum of the tokens' logprobs
    detokenizer: Detokenizer | None = None  # only where there are stop strings to look for
    grammar: BeamGrammar | None = None  # only where the answer is constrained
    finish: FinishReason | None = None
    stop_token_id: int | None = None

    def score(self, length_penalty: float, length: int | None = None) -> float:
        length = len(self.token_ids) if length is None else length
        return float(self.total / max(1, length) ** length_penalty)

    def output(self, request_id: str, cached_tokens: int | None = None) -> SequenceOutput:
        """The whole beam as the engine would have reported a sequence."""
        return SequenceOutput(
            request_id,
            self.token_ids,
            self.logprobs,
            cached_tokens=cached_tokens,
            finish=self.finish,
            stop_token_id=self.stop_token_id,
        )


# What comes after a beam: the 2 x width best tokens with their logprobs, in descending order.
Expand = Callable[[Beam], Awaitable[TokenLogprobs]]


@dataclass(frozen=True)
class BeamOptions:
    n: int  # beams to answer
    width: int  # beams to follow
    length_penalty: float = 1.0
    early_stopping: bool | str = False


@dataclass
class BeamSearch:
    options: BeamOptions
    params: SamplingParams  # max_tokens, min_tokens and stop_token_ids count
    detokenizer: Detokenizer | None = None  # of an empty beam, where there are stop strings
    grammar: BeamGrammar | None = None  # of an empty beam, where the answer is constrained
    living: list[Beam] = field(default_factory=list)
    ended: list[Beam] = field(default_factory=list)

    async def run(self, expand: Expand) -> list[Beam]:
        """All beams worth an answer, best first; at least `width` of them."""
        self.living = [Beam(detokenizer=self.detokenizer, grammar=self.grammar)]
        for length in range(1, self.params.max_tokens + 1):
            tops = await asyncio.gather(*[expand(beam) for beam in self.living])
            self._advance(tops, length)
            if not self.living or self._is_decided(length):
                return self.ended
        cut_off = [replace(beam, finish=FinishReason.LENGTH) for beam in self.living]
        return self._ranked([*self.ended, *cut_off])

    def _advance(self, tops: list[TokenLogprobs], length: int) -> None:
        candidates = [
            (beam.total + logprob, beam, token_id, logprob, top)
            for beam, top in zip(self.living, tops, strict=True)
            for token_id, logprob in zip(top.token_ids[1:], top.logprobs[1:], strict=True)
            if length > self.params.min_tokens or token_id not in self.params.stop_token_ids
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        self.living = []
        for place, (total, beam, token_id, logprob, top) in enumerate(candidates[: 2 * self.options.width]):
            longer = self._extended(beam, total, token_id, logprob, top)
            if longer.finish is None:
                if len(self.living) < self.options.width:
                    self.living.append(longer)
            elif place < self.options.width:  # an end among the worse half would crowd out better beams
                self.ended.append(longer)
        self.ended = self._ranked(self.ended)[: self.options.width]

    def _extended(self, beam: Beam, total: float, token_id: int, logprob: float, top: TokenLogprobs) -> Beam:
        rank = 1 + sum(other > logprob for other in top.logprobs[1:])
        position = TokenLogprobs((token_id, *top.token_ids[1:]), (logprob, *top.logprobs[1:]), rank)
        stops = token_id in self.params.stop_token_ids
        detokenizer = beam.detokenizer
        if detokenizer is not None and not stops:
            detokenizer = detokenizer.fork()
            detokenizer.feed([token_id])
        grammar = beam.grammar.after(token_id) if beam.grammar is not None and not stops else None
        stopped = (detokenizer is not None and detokenizer.stopped is not None) or (
            grammar is not None and grammar.done
        )
        return Beam(
            (*beam.token_ids, token_id),
            (*beam.logprobs, position),
            total,
            detokenizer,
            grammar,
            FinishReason.STOP if stops or stopped else None,
            token_id if stops else None,
        )

    def _is_decided(self, length: int) -> bool:
        options = self.options
        if len(self.ended) < options.width:
            return False
        if options.early_stopping is True:
            return True
        grows_better = options.early_stopping == "never" and options.length_penalty > 0
        longest = self.params.max_tokens if grows_better else length
        hope = max(beam.score(options.length_penalty, longest) for beam in self.living)
        return hope <= self.ended[-1].score(options.length_penalty)

    def _ranked(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -beam.score(self.options.length_penalty))


class BeamGeneration:
    """A `Generation` by beam search: one search a prompt, of whose beams the best `n` are answered.

    `candidates` are a prompt's n choices; their requests say what the search is about, and are never sent.
    """

    def __init__(
        self,
        client: EngineClient,
        candidates: Sequence[Candidate],
        timing: Timing,
        options: BeamOptions,
        grammar: BeamGrammar | None = None,
    ) -> None:
        """`grammar`: the constraint on every answer, at its beginning."""
        self._client = client
        self._grammar = grammar
        self.candidates = list(candidates)
        self._options = options
        self._live: set[str] = set()
        self._num_requests = 0
        self.timing = timing

    @property
    def usage(self) -> Usage:
        return usage_of(self.candidates)

    def abort(self) -> None:
        for request_id in self._live:
            self._client.abort(request_id)
        self._live.clear()

    async def run(self, on_step: OnStep) -> None:
        n = self._options.n
        try:
            async with asyncio.TaskGroup() as group:
                for start in range(0, len(self.candidates), n):
                    group.create_task(self._answer(start, self.candidates[start : start + n], on_step))
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            self.abort()

    async def _answer(self, start: int, choices: Sequence[Candidate], on_step: OnStep) -> None:
        """Searches for one prompt and hands on its choices."""
        request = choices[0].request
        first: list[SequenceOutput] = []

        async def expand(beam: Beam) -> TokenLogprobs:
            output = await self._next_tokens(request, beam, with_prompt=not first)
            first.append(output)
            assert output.logprobs is not None
            top = output.logprobs[0]
            return top if beam.grammar is None else beam.grammar.best(top, self._num_tops(request))

        stop_finder = choices[0].pipeline.stop_finder()
        try:
            beams = await BeamSearch(self._options, request.params, stop_finder, self._grammar).run(expand)
        except GrammarError as error:
            raise BadRequest(error.message, param=choices[0].grammar_param, code="invalid_grammar") from None
        for place, choice in enumerate(choices):
            beam = beams[min(place, len(beams) - 1)]  # a constraint may allow fewer texts than are asked for
            output = replace(beam.output(request.id), prompt_logprobs=first[0].prompt_logprobs)
            on_step(start + place, choice.take(output, first[0].cached_tokens))
            self.timing.note(start + place, len(beam.token_ids), first[0])

    def _num_tops(self, request: Request) -> int:
        return max(2 * self._options.width, request.params.logprobs or 0)

    async def _next_tokens(self, request: Request, beam: Beam, *, with_prompt: bool) -> SequenceOutput:
        self._num_requests += 1
        count = self._num_tops(request)
        named: tuple[int, ...] = ()
        if beam.grammar is not None:
            count, named = beam.grammar.wanted(count)
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=count,
            logprob_token_ids=named,
            prompt_logprobs=request.params.prompt_logprobs if with_prompt else None,
        )
        step = replace(
            request,
            id=f"{request.id}-{self._num_requests}",
            prompt_ids=request.prompt_ids + beam.token_ids,
            params=params,
            grammar=None,
        )
        self._live.add(step.id)
        outputs = [output async for output in self._client.submit(step)]
        self._live.discard(step.id)
        if outputs[-1].finish in (FinishReason.ERROR, FinishReason.ABORT):
            raise engine_error(outputs[-1], None)
        return next(output for output in outputs if output.logprobs)
