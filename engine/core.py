"""The engine's loop body: requests in, tokens out. `EngineCore.step` is the whole engine on one screen.

Synchronous, one thread, no asyncio, no sockets: commands come from `receive()`, messages are returned. Owns which
requests are open, and sees to it that each ends with exactly one final event; the scheduler owns the pages.
Knows no torch (the runner does) and no text.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic

from engine import admission
from engine.counters import Counters
from engine.grammar import Grammar, GrammarError
from engine.messages import (
    Abort,
    Command,
    EngineConfig,
    FinishReason,
    GetStats,
    GrammarSpec,
    Request,
    RequestError,
    ResetPrefixCache,
    SequenceOutput,
    Stats,
    StepOutput,
)
from engine.pages import PagePool
from engine.running import Runner
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sampled, Sequence, SequenceFailure, State

log = logging.getLogger("engine")

Message = StepOutput | Stats | ResetPrefixCache  # ResetPrefixCache is sent back once it is done


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        compile_grammar: Callable[[GrammarSpec], Future[Grammar]],
        receive: Callable[[], list[Command]],
    ) -> None:
        """`receive()` returns the commands that have arrived, in order, without waiting. Grammars are compiled
        elsewhere, so that the others go on meanwhile: a second for the first one, which reads the tokenizer."""
        info = runner.info
        self.pool = PagePool(info.num_pages, info.page_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            on_release=runner.forget,
        )
        self.vocab_size = info.vocab_size
        # No sequence grows beyond the context, nor beyond what the pool holds when it is alone.
        self.max_len = min(info.max_model_len, info.num_pages * info.page_size)
        self.max_num_queued = config.max_num_queued
        self._runner = runner
        self._compile_grammar = compile_grammar
        self._receive = receive
        self._sequences: dict[str, Sequence] = {}  # the open requests
        self._compiling: dict[Sequence, Future[Grammar]] = {}  # those of them that the scheduler has not got yet
        self._in_flight: Plan | None = None  # launched, not yet committed
        self._outputs: list[SequenceOutput] = []  # of this step
        self._tokens: list[tuple[str, tuple[int, ...]]] = []  # of the steps since the last message
        self._output_interval_s = config.output_interval_s
        self._next_message_at = 0.0
        self._replies: list[Message] = []
        self._random = random.Random(config.seed)
        self._num_arrived = 0
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        return len(self._sequences) > len(self._compiling)

    def step(self) -> list[Message]:
        """Take commands and compute one plan; the messages to send. Raises if the engine as a whole is broken."""
        self._take_commands()
        with self._counters.phase("plan"):
            plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight = plan
            sampled = self._compute(plan)
            self._take_commands()  # an abort that arrived meanwhile beats its token
            self._in_flight = None
            with self._counters.phase("commit"):
                self._commit(plan, sampled)
        elif self.has_work:
            raise RuntimeError("there are requests, but none can run")  # cannot be; better loud than for ever
        return self._take_messages()

    def stats(self) -> Stats:
        return self._counters.snapshot(self.scheduler, self._num_waiting)

    @property
    def _num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self._compiling)

    # ---- commands

    def _take_commands(self) -> None:
        for command in self._receive():
            match command:
                case Request():
                    self._add(command)
                case Abort():
                    self._abort(command.request_id)
                case GetStats():
                    self._replies.append(self.stats())
                case ResetPrefixCache():
                    self.pool.reset_cache()
                    self._replies.append(command)
        self._take_grammars()

    def _add(self, request: Request) -> None:
        if (error := self._refusal(request)) is not None:
            self._counters.count_finish(FinishReason.ERROR, was_admitted=False)
            self._outputs.append(SequenceOutput(request.id, finish=FinishReason.ERROR, error=error))
            return
        self._num_arrived += 1
        seed = request.params.seed if request.params.seed is not None else self._random.getrandbits(63)
        seq = Sequence(request, self._num_arrived, seed)
        self._sequences[request.id] = seq
        if request.grammar is None:
            self.scheduler.add(seq)
        else:
            self._compiling[seq] = self._compile_grammar(request.grammar)

    def _take_grammars(self) -> None:
        for seq in [seq for seq, future in self._compiling.items() if future.done()]:
            try:
                seq.grammar = self._compiling[seq].result()
            except GrammarError as failure:  # the worker has checked it: only limits of the engine's own are left
                self._finish(seq, FinishReason.ERROR, error=RequestError("grammar_failed", failure.message))
            except Exception:
                log.exception("a grammar could not be compiled")
                self._finish(seq, FinishReason.ERROR, error=_BROKEN_GRAMMAR)
            else:
                seq.grammar.stop_ids = seq.params.stop_token_ids
                del self._compiling[seq]
                self.scheduler.add(seq)

    def _refusal(self, request: Request) -> RequestError | None:
        if request.id in self._sequences:
            return RequestError("duplicate_id", f"A request with the id {request.id!r} is running already.")
        if self._num_waiting >= self.max_num_queued:
            wait_s = self._counters.retry_after_s(self._num_waiting)
            return RequestError("queue_full", "Too many requests are waiting; try again later.", wait_s)
        return admission.check(request, self.max_len, self.vocab_size)

    def _abort(self, request_id: str) -> None:
        seq = self._sequences.get(request_id)
        if seq is None:
            return  # it has just ended, or never was
        if self._in_flight is not None and seq.state is State.RUNNING:
            seq.aborted = True  # the device may still be writing to its pages: until the commit
        else:
            self._finish(seq, FinishReason.ABORT)

    # ---- one step

    def _compute(self, plan: Plan) -> list[Sampled] | None:
        """None if the plan failed because of one sequence: that one ends, the others are planned again."""
        try:
            with self._counters.phase("launch"):
                pending = self._runner.launch(plan)
            with self._counters.phase("collect"):
                return self._runner.collect(pending)
        except SequenceFailure as failure:
            self._finish(failure.seq, FinishReason.ERROR, error=failure.error)
            return None

    def _commit(self, plan: Plan, sampled: list[Sampled] | None) -> None:
        if sampled is not None:
            self._counters.count_step(plan)
            self.scheduler.advance(plan)
            for result in sampled:
                if result.error is not None:
                    self.pool.forget(result.seq.pages)  # what went wrong may be in them: nobody else shall find it
                if not result.seq.aborted:
                    self._commit_one(result)
        for part in plan.parts:
            seq = part.seq
            if seq.aborted:
                self._finish(seq, FinishReason.ABORT)
            elif not seq.params.max_tokens and seq.num_computed == seq.num_prompt and seq.state is State.RUNNING:
                self._finish(seq, FinishReason.LENGTH)

    def _commit_one(self, result: Sampled) -> None:
        seq, finish, error = result.seq, None, result.error
        if result.prompt_logprobs is not None and seq.wants_prompt_logprobs:
            seq.prompt_logprobs += result.prompt_logprobs
        if error is None:
            for count, token_id in enumerate(result.token_ids, 1):
                finish = seq.append(token_id, self.max_len)
                if seq.grammar is not None and finish is not FinishReason.STOP:
                    done, error = _accept(seq.grammar, token_id)
                    finish = FinishReason.STOP if done else finish
                if finish or error:
                    del result.token_ids[count:]
                    break
        if error is not None:
            self._finish(seq, FinishReason.ERROR, error=error)
        elif finish is not None:
            self._finish(seq, finish, result)
        elif result.token_ids:
            if seq.reported and result.logprobs is None:
                self._counters.generation_tokens += len(result.token_ids)
                self._tokens.append((seq.request.id, tuple(result.token_ids)))
            else:
                self._outputs.append(self._output(seq, result))

    # ---- events

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        result: Sampled | None = None,
        error: RequestError | None = None,
    ) -> None:
        """The one place where a sequence that was accepted ends."""
        del self._sequences[seq.request.id]
        self._outputs.append(self._output(seq, result, reason, error))
        self._counters.count_finish(reason, was_admitted=seq.cached_tokens is not None)
        if self._compiling.pop(seq, None) is None:
            self.scheduler.remove(seq)
        seq.sampling_state = seq.grammar = None

    def _output(
        self,
        seq: Sequence,
        result: Sampled | None,
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> SequenceOutput:
        token_ids = tuple(result.token_ids) if result else ()
        stopped_by_token = finish is FinishReason.STOP and token_ids[-1] in seq.params.stop_token_ids
        self._counters.generation_tokens += len(token_ids)
        first, seq.reported = not seq.reported, True
        admitted_at = seq.admitted_at if first else None
        prompt_logprobs = None
        if first and seq.num_computed >= seq.num_prompt:
            self._counters.count_prompt(seq)
            prompt_logprobs = tuple(seq.prompt_logprobs) if seq.params.prompt_logprobs is not None else None
            seq.prompt_logprobs = []
        return SequenceOutput(
            request_id=seq.request.id,
            token_ids=token_ids,
            logprobs=tuple(result.logprobs[: len(token_ids)]) if result and result.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=seq.cached_tokens if first else None,
            finish=finish,
            stop_token_id=token_ids[-1] if stopped_by_token else None,
            error=error,
            queue_s=None if admitted_at is None else admitted_at - seq.arrived_at,
            prefill_s=None if admitted_at is None else monotonic() - admitted_at,
        )

    def _take_messages(self) -> list[Message]:
        """Ends, errors and first tokens, with all else there is, at once; further tokens of steps in one message.

        None is kept for good: whoever has tokens here goes on, or has its end among the outputs.
        """
        messages, self._replies = self._replies, []
        if self._outputs or (self._tokens and monotonic() >= self._next_message_at):
            messages.insert(0, StepOutput(tuple(self._outputs), tuple(self._tokens)))
            self._outputs, self._tokens = [], []
            self._next_message_at = monotonic() + self._output_interval_s
        return messages


_BROKEN_GRAMMAR = RequestError("grammar_failed", "The grammar of the request failed.")


def _accept(grammar: Grammar, token_id: int) -> tuple[bool, RequestError | None]:
    """Whether the output is complete with this token, and what is wrong with it."""
    try:
        if grammar.accept(token_id):
            return grammar.done, None
    except Exception:  # one request's grammar in third-party code: no reason to end the others
        log.exception("a grammar failed")
        return False, _BROKEN_GRAMMAR
    return False, RequestError("grammar_failed", "The output left the grammar of the request.")
