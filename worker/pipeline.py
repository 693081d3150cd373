"""One choice on its way from token ids to what a client is told: detokenizer -> parser -> deltas.

An `OutputPipeline` turns each SequenceOutput of the engine into a `Step`; the last step of a choice has its finish.
It is what decides that a stop string ended the text. Knows no requests, chunks or other choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import FinishReason, SequenceOutput, TokenLogprobs
from worker.detokenizer import Detokenizer
from worker.parsers.base import Content, Delta, Parser, Reasoning, merge
from worker.parsers.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended: `reason` "stop" or "length"; `stop_reason` the client's stop string or stop token id."""

    reason: str
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What is new of one choice. Tokens may come before their text: text is held back until it is certain."""

    deltas: tuple[Delta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # with the first step, where asked for
    reasoning_tokens: int = 0
    finish: Finish | None = None

    def __add__(self, later: Step) -> Step:
        return Step(
            tuple(merge([*self.deltas, *later.deltas])),
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.prompt_logprobs or later.prompt_logprobs,
            self.reasoning_tokens + later.reasoning_tokens,
            later.finish,
        )

    @property
    def content(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, Content))


@dataclass(frozen=True, slots=True)
class StopRules:
    """What may end a choice beside its length, and what a client is told of it."""

    reported: frozenset[str | int] = frozenset()  # the request's own stop strings and ids: these are a stop_reason
    show_stop: bool = False  # whether a stop token's text is shown (include_stop_str_in_output)


class OutputPipeline:
    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: Parser | None = None,
        rules: StopRules | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._parser = parser
        self._rules = rules or StopRules()
        self._reasoning = False  # whether the last text that came out was reasoning

    def feed(self, output: SequenceOutput) -> Step:
        """Takes what the engine made, which must not have failed. After a step with a finish comes no other: where a
        stop string ended the text and `output` did not, it is for the caller to abort the engine's sequence."""
        detokenizer = self._detokenizer
        ids = output.token_ids
        hide_last = output.stop_token_id is not None and not self._rules.show_stop
        shown = ids[:-1] if hide_last else ids
        deltas: list[Delta] = []
        before, reasoning_tokens = detokenizer.num_tokens, 0
        # Reasoning is counted token by token, so that the count does not depend on how tokens arrive.
        for part in [shown] if self._parser is None else [(token_id,) for token_id in shown]:
            answering = isinstance(self._parser, Pipeline) and self._parser.answering
            new = self._parse(detokenizer.feed(part))
            reasoning_tokens += self._is_reasoning(new, answering)
            deltas += new
            if detokenizer.stopped is not None:
                ids = ids[: detokenizer.num_tokens - before]
                break
        finish = self._finish(output)
        if finish is not None:
            deltas += self._parse(detokenizer.close())
            deltas += self._parser.close() if self._parser is not None else []
        return Step(
            deltas=tuple(merge(deltas)),
            token_ids=ids,
            logprobs=(output.logprobs or ())[: len(ids)],
            prompt_logprobs=output.prompt_logprobs,
            reasoning_tokens=reasoning_tokens,
            finish=finish,
        )

    def stop_finder(self) -> Detokenizer | None:
        """A detokenizer in this pipeline's state, for a search that must see stop strings; None: there are none."""
        return self._detokenizer.fork() if self._detokenizer.has_stops else None

    def _finish(self, output: SequenceOutput) -> Finish | None:
        stopped = self._detokenizer.stopped
        if stopped is not None:
            return Finish("stop", stopped if stopped in self._rules.reported else None)
        if output.finish is None:
            return None
        if output.finish is FinishReason.LENGTH:
            return Finish("length")
        stop_id = output.stop_token_id
        return Finish("stop", stop_id if stop_id in self._rules.reported else None)

    def _parse(self, text: str) -> list[Delta]:
        if self._parser is None or not text:
            return [Content(text)] if text else []
        return self._parser.feed(text)

    def _is_reasoning(self, deltas: Sequence[Delta], answering: bool) -> bool:
        """Whether a token is reasoning: if its text is, or, where no text has come of it, if the text before was and
        the thoughts were not over (`answering`)."""
        if deltas:
            self._reasoning = isinstance(deltas[-1], Reasoning)
        return self._reasoning and not (answering and not deltas)
