"""Runners without a model, for everything around the model. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.messages import TokenLogprobs
from engine.scheduler import Plan
from engine.sequence import Sampled, Sequence


@dataclass
class FakeInfo:
    num_pages: int = 64
    page_size: int = 16
    vocab_size: int = 1000
    max_model_len: int = 512
    device: str = "cpu"
    dtype: str = "float32"
    attention_backend: str = "none"
    load_s: dict[str, float] = field(default_factory=dict)


class CountingRunner:
    """The next token is the last one + 1. Keeps a KV pool of its own in which each slot holds the (position, token)
    written there, and checks before every step that each token of a sequence is found where its pages say: a page
    that is shared wrongly, evicted too early or never computed shows at once."""

    def __init__(self, **info: Any) -> None:
        self.info = FakeInfo(**info)
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> (position, token)
        self.plans: list[Plan] = []
        self.forgotten: list[Sequence] = []
        self.num_computed = 0

    def launch(self, plan: Plan) -> Plan:
        self.plans.append(plan)
        self.num_computed += plan.num_tokens
        written: set[tuple[int, int]] = set()
        for part in plan.parts:
            assert part.count > 0
            for position in range(part.start, part.start + part.count):
                slot = self.slot(part.seq, position)
                assert slot not in written, "two parts of a step write to one slot"
                written.add(slot)
                self.kv[slot] = (position, part.seq.token_ids[position])
        for part in plan.parts:
            for position in range(part.start + part.count):
                assert self.kv.get(self.slot(part.seq, position)) == (position, part.seq.token_ids[position])
        return plan

    def slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.pages[position // self.info.page_size], position % self.info.page_size

    def collect(self, plan: Plan) -> list[Sampled]:
        results = []
        for part in plan.parts:
            prompt_logprobs: list[TokenLogprobs | None] | None = None
            if part.seq.wants_prompt_logprobs:
                ids = part.seq.token_ids[part.start + 1 : min(part.start + part.count + 1, part.seq.num_prompt)]
                prompt_logprobs = [logprobs(token, part.seq.params.prompt_logprobs or 0) for token in ids]
                if part.start == 0:
                    prompt_logprobs.insert(0, None)
            if part.samples or prompt_logprobs is not None:
                tokens = [self.next_token(part.seq)] if part.samples else []
                count = part.seq.params.logprobs
                tops = [logprobs(token, count) for token in tokens] if count is not None else None
                results.append(Sampled(part.seq, tokens, tops, prompt_logprobs))
        return results

    def next_token(self, seq: Sequence) -> int:
        return (seq.token_ids[-1] + 1) % self.info.vocab_size

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)


def logprobs(token: int, count: int) -> TokenLogprobs:
    """`token` is the likeliest, the ids above it follow with one less each."""
    tops = [(token + k, -0.5 - k) for k in range(max(count, 0))]
    return TokenLogprobs((token, *(t for t, _ in tops)), (-0.5, *(p for _, p in tops)), 1)
