"""What the writers of answers share.

A writer gets the steps of its choices in any interleaving and then `close`; a streamed one sends events meanwhile, a
whole one sends its only body at the end. Writers know nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from worker.logprobs import LogprobFormat
from worker.pipeline import Step
from worker.protocol.responses import Head, Usage


class Writer(Protocol):
    def step(self, index: int, step: Step) -> None: ...

    def close(self) -> None:
        """After the last step of the last choice."""


@dataclass(frozen=True)
class Frame:
    """What every writer is given."""

    head: Head
    send: Callable[[Any], None]
    usage: Callable[[], Usage]  # so far
    include_usage: bool = False  # a stream ends with its usage
    form: LogprobFormat | None = None  # None: no logprobs of the answer asked for
    prompt_form: LogprobFormat | None = None  # None: no prompt_logprobs asked for
    num_extra: int = 0  # how many ids were asked for by name (logprob_token_ids)
