"""One operation, from what a client asked to what it is answered.

    serving.answer(operation, job_id) -> Answer        `delivery.deliver` runs it

For a generation: validate -> render and encode -> sampling parameters -> run the sequences in the engine -> a writer of
the right protocol. All refusals happen before the engine hears of a request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.client import EngineClient
from engine.grammar import GrammarError
from engine.messages import Request, SamplingParams
from worker import introspect
from worker.answers.base import Frame, Writer
from worker.answers.chat import ChatRules, StreamedChat, WholeChat
from worker.answers.completion import CompletionRules, StreamedCompletion, WholeCompletion
from worker.answers.native import NativeStream, NativeWhole
from worker.beam import BeamGeneration, BeamOptions, refuse_beside_beams
from worker.beam_grammar import BeamGrammar
from worker.detokenizer import Detokenizer
from worker.errors import BadRequest, RateLimited, WorkerError
from worker.generation import Candidate, Generation, Timing, ranked
from worker.jobs import Operation
from worker.logprobs import LogprobFormat
from worker.metrics import Metrics
from worker.pipeline import OutputPipeline, StopRules
from worker.prompts import Prompt
from worker.protocol import sse
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest
from worker.protocol.responses import Head, new_id
from worker.sampling import sampling_params
from worker.served import ServedModel
from worker.structured import OutputPlan

log = logging.getLogger("worker")

AnyRequest = ChatCompletionRequest | CompletionRequest
Send = Callable[[Any], None]


class Serving:
    def __init__(self, model: ServedModel, client: Callable[[], EngineClient], metrics: Metrics) -> None:
        """`client` gives the engine client of the running loop."""
        self.model = model
        self.client = client
        self.metrics = metrics

    def answer(self, operation: Operation, job_id: str) -> Answer:
        return Answer(self, operation, job_id)


class Answer:
    """One operation being answered; see `delivery.Answer`."""

    def __init__(self, serving: Serving, operation: Operation, job_id: str) -> None:
        self.id = job_id
        self.events = operation.stream and operation.native is None
        self._serving = serving
        self._model = serving.model
        self._operation = operation
        self._timing = Timing(time.monotonic())
        self._generation: Generation | BeamGeneration | None = None

    def abort(self) -> None:
        if self._generation is not None:
            self._generation.abort()

    async def run(self, send: Send) -> None:
        try:
            match self._operation.kind:
                case "chat":
                    await self._chat(await ChatCompletionRequest.parse_async(self._operation.body), send)
                case "completions":
                    await self._completions(await CompletionRequest.parse_async(self._operation.body), send)
                case _:
                    serving = self._serving
                    send(await introspect.answer(self._operation, self._model, serving.client, serving.metrics))
        except WorkerError as error:
            if isinstance(error, RateLimited):
                self._serving.metrics.rejected()
            if error.status >= 500:
                error.message += f" (request {self.id})"  # by which the log tells more
            log.info("%s %s: %d %s", self._operation.kind, self.id, error.status, error.code)
            raise

    async def _chat(self, request: ChatCompletionRequest, send: Send) -> None:
        model = self._model
        name = model.resolve(request.model)
        if request.use_beam_search:
            refuse_beside_beams(request)
        prompt = await model.prompts.chat(request)
        plan = await model.outputs.plan(request, prompt)
        head = Head.chat(name, request.request_id, model.fingerprint)
        frame = self._frame(request, head, send)
        rules = ChatRules(request, frame, model.answer_role(request))
        writer: Writer = self._native_writer(request, frame, 1) or (
            StreamedChat(rules, prompt) if request.stream else WholeChat(rules, prompt)
        )
        await self._generate(request, [prompt], plan, writer)

    async def _completions(self, request: CompletionRequest, send: Send) -> None:
        model = self._model
        name = model.resolve(request.model)
        if request.use_beam_search:
            refuse_beside_beams(request)
        prompts = await model.prompts.completions(request)
        plan = await model.outputs.plan_completion(request.constraint)
        head = Head.completion(name, request.request_id, model.fingerprint)
        frame = self._frame(request, head, send)
        append = not model.prompts.fills_in
        rules = CompletionRules(request, prompts, frame, model.tokenizer, append_suffix=append)
        writer: Writer = self._native_writer(request, frame, len(prompts)) or (
            StreamedCompletion(rules) if request.stream else WholeCompletion(rules)
        )
        await self._generate(request, prompts, plan, writer)

    async def _generate(self, request: AnyRequest, prompts: Sequence[Prompt], plan: OutputPlan, writer: Writer) -> None:
        bad_words = self._model.bad_words(request.bad_words)
        params = [self._params(request, prompt, bad_words) for prompt in prompts]
        self._log_request(request, prompts[0], params[0])
        client = self._serving.client()
        if request.use_beam_search:
            candidates = self._candidates(request, prompts, plan, params, request.n)
            options = BeamOptions(request.n, request.num_sequences, request.length_penalty, request.early_stopping)
            grammar = await self._beam_grammar(plan, params[0])
            self._generation = BeamGeneration(client, candidates, self._timing, options, grammar)
            await self._generation.run(writer.step)
        else:
            candidates = self._candidates(request, prompts, plan, params, request.num_sequences)
            self._generation = generation = Generation(client, candidates, self._timing, request.stream_interval)
            if request.num_sequences > request.n:
                await ranked(generation, len(prompts), request.n, writer.step)
            else:
                await generation.run(writer.step)
        writer.close()
        self._note(params[0], request.n * len(prompts))

    async def _beam_grammar(self, plan: OutputPlan, params: SamplingParams) -> BeamGrammar | None:
        if plan.grammar is None:
            return None
        try:
            grammar = await asyncio.to_thread(self._model.grammars.compile, plan.grammar)
        except GrammarError as error:
            raise BadRequest(error.message, param=plan.param, code="invalid_grammar") from None
        grammar.stop_ids = params.stop_token_ids
        return BeamGrammar(grammar, self._model.sampling.vocab_size)

    def _params(self, request: AnyRequest, prompt: Prompt, bad_words: Sequence[tuple[int, ...]]) -> SamplingParams:
        model = self._model
        params = sampling_params(
            request, model.limits(prompt), model.defaults, num_prompt_tokens=len(prompt.ids), bad_words=bad_words
        )
        ranks = request.num_sequences > request.n and not request.use_beam_search
        return replace(params, logprobs=params.logprobs or 0) if ranks else params

    def _candidates(
        self,
        request: AnyRequest,
        prompts: Sequence[Prompt],
        plan: OutputPlan,
        params: Sequence[SamplingParams],
        per_prompt: int,
    ) -> list[Candidate]:
        run_id = new_id()
        return [
            Candidate(
                Request(
                    id=f"{run_id}-{place * per_prompt + choice}",
                    prompt_ids=prompt.ids,
                    params=params[place],
                    choice=choice,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    grammar=plan.grammar,
                ),
                self._pipeline(request, prompt, plan),
                place,
                plan.param,
            )
            for place, prompt in enumerate(prompts)
            for choice in range(per_prompt)
        ]

    def _pipeline(self, request: AnyRequest, prompt: Prompt, plan: OutputPlan) -> OutputPipeline:
        model = self._model
        ends = () if request.ignore_eos else model.stop_words(prompt)
        detokenizer = Detokenizer(
            model.tokenizer,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            stop=(*request.stop, *ends),
            include_stop_str=request.include_stop_str_in_output,
            min_tokens=request.min_tokens,
            previous=prompt.previous,
            keep=plan.keep,
        )
        own_ids = set(request.stop_token_ids) - (set() if request.ignore_eos else model.limits(prompt).stop_ids)
        rules = StopRules(frozenset([*request.stop, *own_ids]), request.include_stop_str_in_output)
        return OutputPipeline(detokenizer, plan.parser and plan.parser(), rules)

    def _frame(self, request: AnyRequest, head: Head, send: Send) -> Frame:
        model = self._model
        as_ids = request.return_tokens_as_token_ids or model.settings.return_tokens_as_token_ids
        count = request.num_logprobs
        return Frame(
            head,
            send if self._operation.native else naming_ignored(request.ignored_fields(), send),
            usage=lambda: self._generation.usage,  # type: ignore[union-attr]
            include_usage=request.wants_usage or model.settings.force_include_usage,
            form=None if count is None else LogprobFormat(model.tokenizer, count, as_ids),
            prompt_form=None if request.prompt_logprobs is None else LogprobFormat(model.tokenizer, 0, as_ids),
            num_extra=len(request.logprob_token_ids),
        )

    def _native_writer(self, request: AnyRequest, frame: Frame, num_prompts: int) -> Writer | None:
        native, settings = self._operation.native, self._model.settings
        if native is None:
            return None
        if not request.stream:
            return NativeWhole(frame, num_prompts * request.n)
        return NativeStream(
            frame,
            num_prompts * request.n,
            first=native.min_batch_size or settings.min_batch_size,
            most=native.max_batch_size or settings.max_batch_size,
            growth=native.batch_size_growth_factor or settings.batch_size_growth_factor,
        )

    def _log_request(self, request: AnyRequest, prompt: Prompt, params: SamplingParams) -> None:
        if ignored := request.ignored_fields():
            log.info("%s %s: these fields mean nothing here: %s", self._operation.kind, self.id, ", ".join(ignored))
        settings = self._model.settings
        if settings.log_requests:
            text = (prompt.text or "")[: settings.max_log_chars]
            log.info("%s %s: %s, prompt %r", self._operation.kind, self.id, params, text)

    def _note(self, params: SamplingParams, num_choices: int) -> None:
        """One line of log and the metrics of a request that was answered."""
        generation = self._generation
        assert generation is not None
        usage, timing = generation.usage, generation.timing
        reasons = [candidate.finish_reason or "" for candidate in generation.candidates]
        self._serving.metrics.answered(timing, usage, params, num_choices, reasons)
        first = timing.first_token or timing.started
        log.info(
            "%s %s: prompt %d (%d cached), answer %d, %s, first token %.0f ms, all %.0f ms",
            self._operation.kind,
            self.id,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            "/".join(dict.fromkeys(reasons)),
            1000 * (first - timing.started),
            1000 * ((timing.last_token or first) - timing.started),
        )


def naming_ignored(names: Sequence[str], send: Send) -> Send:
    """`send`, whose first item also names the fields of the request that mean nothing here. The platform's side makes
    a response header of it: a stream says it in a comment, which clients skip, a body under a key of its own."""
    if not names:
        return send
    left = [re.sub(r"[^ -~]", "?", ", ".join(names))[:1000]]

    def send_naming(item: Any) -> None:
        if left and isinstance(item, str):
            send(sse.comment(f"ignored-fields {left.pop()}"))
        elif left and isinstance(item, dict):
            left.clear()
            item = {**item, "ignored_fields": list(names)}
        send(item)

    return send_naming
