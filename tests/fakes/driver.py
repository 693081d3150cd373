"""Turns the crank of an EngineCore by hand and keeps what each request was told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.core import EngineCore, Message
from engine.grammar import Grammar
from engine.messages import (
    Command,
    EngineConfig,
    FinishReason,
    GrammarSpec,
    Request,
    SamplingParams,
    SequenceOutput,
    StepOutput,
)
from engine.running import Runner


def no_grammar(spec: GrammarSpec) -> Grammar:
    raise AssertionError("this test has no grammar")


def request(name: str, prompt: Any, max_tokens: int = 8, **options: Any) -> Request:
    """A greedy request; options that are not the request's own are sampling parameters."""
    own = {key: options.pop(key) for key in ("priority", "cache_salt", "grammar", "choice") if key in options}
    return Request(name, tuple(prompt), SamplingParams(max_tokens, temperature=0.0, **options), **own)


class Driver:
    def __init__(
        self, runner: Runner, make_grammar: Callable[[GrammarSpec], Grammar] = no_grammar, **config: Any
    ) -> None:
        self.inbox: list[Command] = []
        self.grammars_are_slow = False  # then `finish_grammars` ends what has been begun
        self._make_grammar = make_grammar
        self._begun: list[tuple[GrammarSpec, Future[Grammar]]] = []
        self.core = EngineCore(EngineConfig("none", **config), runner, self._compile, self._take)
        self._gathers = "output_interval_s" in config  # tokens of several steps in one message
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.messages: list[Message] = []
        self.num_steps = 0

    def _take(self) -> list[Command]:
        commands, self.inbox = self.inbox, []
        return commands

    def _compile(self, spec: GrammarSpec) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        self._begun.append((spec, future))
        if not self.grammars_are_slow:
            self.finish_grammars()
        return future

    def finish_grammars(self) -> None:
        for spec, future in self._begun:
            try:
                future.set_result(self._make_grammar(spec))
            except Exception as failure:
                future.set_exception(failure)
        self._begun = []

    def send(self, *commands: Command) -> None:
        self.inbox += commands

    def step(self) -> None:
        self.num_steps += 1
        messages = self.core.step()
        self.messages += messages
        for message in messages:
            if isinstance(message, StepOutput):
                plain = [SequenceOutput(name, tokens) for name, tokens in message.tokens]
                told = message.outputs if self._gathers else (*plain, *message.outputs)
                names = [output.request_id for output in told]
                assert len(set(names)) == len(names) or any(output.error for output in message.outputs)
                for output in (*plain, *message.outputs):
                    self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, max_steps: int = 1000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            self.step()
            if not self.core.has_work and not self.inbox:
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, []) for token in output.token_ids]

    def final(self, name: str) -> SequenceOutput:
        """The last output of a request that has ended: the only one with a finish reason."""
        *before, last = self.outputs[name]
        assert last.finish is not None and all(output.finish is None for output in before)
        return last

    def finish(self, name: str) -> FinishReason:
        finish = self.final(name).finish
        assert finish is not None
        return finish

    def check_idle(self) -> None:
        """Nothing is left of any request, and every page is free."""
        scheduler = self.core.scheduler
        scheduler.check()
        assert not self.core.has_work and not scheduler.running and scheduler.num_waiting == 0
        assert self.core.pool.num_free == self.core.pool.num_pages
