"""A slow dense attention, and a scene in which a backend runs steps over pages beside it."""

from __future__ import annotations

import math
import random

import torch

from engine import batch
from engine.attention.base import AttentionBackend, LayerSpec
from engine.kv import KVPool
from engine.messages import Request, SamplingParams
from engine.scheduler import Part, Plan
from engine.sequence import Sequence


def dense_attention(query, keys, values, start: int, spec: LayerSpec, sinks):
    """query [n, Hq, D] at the positions start.., keys [L, Hkv, D], values [L, Hkv, Dv] -> [n, Hq, Dv], in float64."""
    query, keys, values = query.double().cpu(), keys.double().cpu(), values.double().cpu()
    out = torch.zeros(query.shape[0], spec.num_heads, spec.value_dim, dtype=torch.float64)
    for row in range(query.shape[0]):
        position = start + row
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        for head in range(spec.num_heads):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            scores = keys[first : position + 1, kv_head] @ query[row, head] * spec.scale
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double().cpu()])
            weights = torch.softmax(scores, 0)[: position + 1 - first]
            out[row, head] = weights @ values[first : position + 1, kv_head]
    return out


class Scene:
    """Sequences whose keys and values are known in full; `step` computes some of their tokens with the backend."""

    def __init__(
        self, backend: AttentionBackend, spec: LayerSpec, *, page_size: int, device="cpu", dtype=torch.float32, seed=0
    ) -> None:
        self.backend, self.spec, self.dtype = backend, spec, dtype
        self.device = torch.device(device)
        self.random = torch.Generator().manual_seed(seed)
        self.pool = KVPool([spec, spec], 64, page_size, self.device, dtype, backend.tokens_first)
        for pages in (*self.pool.keys, *self.pool.values):
            pages[:-1] = 1e4  # what an earlier owner left behind must not be seen
        self.free = list(range(64))
        random.Random(seed).shuffle(self.free)
        self.history: dict[Sequence, tuple[torch.Tensor, torch.Tensor]] = {}  # all keys and values so far

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device, self.dtype)

    def sequence(self) -> Sequence:
        seq = Sequence(Request("r", (1,), SamplingParams(max_tokens=1)), 0, 0)
        spec = self.spec
        self.history[seq] = (
            self.normal(0, spec.num_kv_heads, spec.head_dim), self.normal(0, spec.num_kv_heads, spec.value_dim)
        )  # fmt: skip
        return seq

    def step(self, counts: dict[Sequence, int]) -> float:
        """Compute the next counts[seq] tokens of each; -> the largest difference to the dense attention."""
        spec, parts = self.spec, []
        for seq, count in counts.items():
            start = len(self.history[seq][0])
            seq.token_ids = [7] * (start + count)
            while len(seq.pages) * self.pool.page_size < start + count:
                seq.pages.append(self.free.pop())
            parts.append(Part(seq, start, count, True))
        step = batch.build(Plan(tuple(parts), sum(counts.values())), self.backend, self.pool)
        total = sum(counts.values())
        query = self.normal(total, spec.num_heads, spec.head_dim)
        key, value = (
            self.normal(total, spec.num_kv_heads, spec.head_dim),
            self.normal(total, spec.num_kv_heads, spec.value_dim),
        )
        sinks = self.normal(spec.num_heads) * 2 if spec.sinks else None
        with torch.inference_mode():
            step.attend(0, spec, query * 0, key * 0, value * 0, sinks)  # another layer does not disturb
            out = step.attend(1, spec, query, key, value, sinks)
        assert out.shape == (total, spec.num_heads, spec.value_dim) and out.dtype == self.dtype
        differences = []
        for part, first in zip(parts, step.first_row.tolist(), strict=True):
            rows = slice(first, first + part.count)
            keys = torch.cat([self.history[part.seq][0], key[rows]])
            values = torch.cat([self.history[part.seq][1], value[rows]])
            self.history[part.seq] = keys, values
            expected = dense_attention(query[rows], keys, values, part.start, spec, sinks)
            differences.append((out[rows].double().cpu() - expected).abs().max().item())
        return max(differences) if all(map(math.isfinite, differences)) else math.inf


def spec_of(heads=(6, 2), dims=(16, 16), window=None, softcap=None, sinks=False) -> LayerSpec:
    return LayerSpec(
        *heads, *dims, scale=1.3 * dims[0] ** -0.5, window=window, softcap=softcap, sinks=sinks
    )  # fmt: skip


SPECS = {
    "grouped heads": spec_of(),
    "one head a key": spec_of(heads=(4, 4)),
    "one key for all": spec_of(heads=(5, 1), dims=(24, 24)),
    "odd head size": spec_of(heads=(4, 2), dims=(10, 10)),
    "other value size": spec_of(dims=(24, 8)),
    "window of one": spec_of(window=1),
    "window inside a page": spec_of(window=5),
    "window over pages": spec_of(window=23),
    "softcap": spec_of(softcap=2.0),
    "sinks": spec_of(sinks=True),
    "all at once": spec_of(window=19, softcap=3.0, sinks=True),
}
# Counts of tokens that four sequences compute, step after step: 1 to 3 pages of 16, mixed prefill and decode.
STEPS = [
    (1, 15, 16, 33), (1, 1, 1, 1), (0, 1, 17, 1), (14, 0, 1, 5), (1, 1, 1, 1), (2, 31, 0, 1), (1, 1, 1, 1),
]  # fmt: skip


def worst_of(scene: Scene) -> float:
    seqs = [scene.sequence() for _ in STEPS[0]]
    return max(scene.step({seq: count for seq, count in zip(seqs, counts, strict=True) if count}) for counts in STEPS)
