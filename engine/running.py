"""What the engine core needs of whatever runs the model: engine.runner.Runner, or a scripted one in tests."""

from __future__ import annotations

from typing import Any, Protocol

from engine.scheduler import Plan
from engine.sequence import Sampled, Sequence


class RunnerInfo(Protocol):
    num_pages: int
    page_size: int
    vocab_size: int
    max_model_len: int
    device: str
    dtype: str
    attention_backend: str
    load_s: dict[str, float]


class Runner(Protocol):
    """Launch and collect are two, so that the next plan can be made while the device works."""

    @property
    def info(self) -> RunnerInfo: ...

    def launch(self, plan: Plan) -> Any:
        """Start the forward pass and the sampling of a plan."""

    def collect(self, pending: Any) -> list[Sampled]:
        """Wait for it: one Sampled a part that samples or has prompt logprobs, in the order of the plan."""

    def forget(self, seq: Sequence) -> None:
        """The sequence is preempted or finished: drop what is kept for it."""
