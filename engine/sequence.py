"""One sequence of tokens on its way through the engine, and what the runner says about it each step.

A sequence knows its tokens (prompt and output) and how many of them have been computed, that is, have their
keys and values in its pages. Everything else (prefill or decode, chunk or whole) follows from these two.

    token_ids  [0 ............ num_prompt ......... num_tokens)
    computed   [0 ..... num_computed)                            always < num_tokens, but when it has just ended
    pages      [0 ............................................)  while running: room for every known token

Knows no torch, no text and no scheduling policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Any

from engine.messages import FinishReason, Request, RequestError, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.grammar import Grammar
    from engine.pages import Prefix


class State(Enum):
    WAITING = "waiting"  # in the scheduler's queue, holds no page
    FOLLOWING = "following"  # waits for a running sequence to compute their common prefix, holds no page
    RUNNING = "running"  # holds pages for all its known tokens
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; compared by identity. The scheduler owns `state`, `pages` and the counters of computed tokens."""

    request: Request
    arrival: int  # serial number of the request in this engine
    seed: int  # resolved: the request's own, or one drawn by the engine
    grammar: Grammar | None = None

    params: SamplingParams = field(init=False)
    token_ids: list[int] = field(init=False)  # prompt + output
    num_prompt: int = field(init=False)
    order: tuple[int, int] = field(init=False)  # (priority, arrival): smaller goes first, unique

    state: State = State.WAITING
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)  # page i holds tokens [i * page_size, (i + 1) * page_size)
    num_registered: int = 0  # leading pages that are known to the prefix cache
    prefix: Prefix = field(init=False)  # names the tokens of these registered pages
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache at the first admission
    arrived_at: float = field(default_factory=monotonic)  # seconds
    admitted_at: float | None = None  # for the first time
    # Sequences that wait for this one to compute their common prefix -> its length in tokens.
    followers: dict[Sequence, int] = field(default_factory=dict)
    leader: Sequence | None = None  # whom this one follows

    aborted: bool = False  # abort arrived while a step was in flight: ends at its commit
    reported: bool = False  # the first output, which carries cached_tokens and prompt_logprobs, has been sent
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of the chunks so far
    sampling_state: Any = None  # the runner's own, e.g. token counts for penalties; dropped at the end

    def __post_init__(self) -> None:
        self.params = self.request.params
        self.token_ids = list(self.request.prompt_ids)
        self.num_prompt = len(self.token_ids)
        self.order = (self.request.priority, self.arrival)
        self.prefix = self.namespace

    @property
    def namespace(self) -> tuple[str, ...]:
        """Only sequences of the same namespace share pages. A tuple: its parts can never run into each other."""
        return (self.request.cache_salt,)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """False once they have been sent: a preempted sequence computes its prompt again."""
        return self.params.prompt_logprobs is not None and not self.reported

    def append(self, token_id: int, max_len: int) -> FinishReason | None:
        """Add a sampled token; the reason if the sequence ends with it (without a grammar's say)."""
        may_stop = self.num_output >= self.params.min_tokens
        self.token_ids.append(token_id)
        if may_stop and token_id in self.params.stop_token_ids:
            return FinishReason.STOP
        if self.num_output >= self.params.max_tokens or self.num_tokens >= max_len:
            return FinishReason.LENGTH
        return None


@dataclass(slots=True)
class Sampled:
    """The runner's result for one part of a plan."""

    seq: Sequence
    token_ids: list[int]  # new tokens: one without drafts, none if the part only computed prompt logprobs
    logprobs: list[TokenLogprobs] | None = None  # one entry a new token, if asked for
    # Of this chunk: for the prompt tokens start+1 .. start+count that exist. The chunk that starts at 0 begins
    # with None, the entry of the first token, so that the chunks together have num_prompt entries.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: RequestError | None = None  # ends this request alone, e.g. logits that are not a number


class SequenceFailure(Exception):
    """Raised by the runner out of launch or collect: this sequence cannot go on, the others can."""

    def __init__(self, seq: Sequence, error: RequestError) -> None:
        super().__init__(error.message)
        self.seq = seq
        self.error = error
