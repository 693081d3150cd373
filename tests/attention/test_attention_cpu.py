"""The compiled CPU backend against a slow dense attention."""

from __future__ import annotations

import math

import pytest
import torch

from engine import batch, native
from engine.attention.base import LayerSpec
from engine.attention.cpu import CpuBackend
from engine.kv import KVPool
from engine.messages import Request, SamplingParams
from engine.scheduler import Part, Plan
from engine.sequence import Sequence

from .dense import SPECS, Scene, spec_of, worst_of

pytestmark = pytest.mark.skipif(native.kernels(torch.float32) is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_dense_attention(spec, page_size):
    assert worst_of(Scene(CpuBackend(), spec, page_size=page_size)) < 2e-5


@pytest.mark.parametrize("spec", [spec_of(), spec_of(window=700), spec_of(sinks=True, softcap=2.0)])
def test_contexts_of_several_spans_are_joined(spec):
    """A long context is cut into spans that threads attend to on their own."""
    scene = Scene(CpuBackend(), spec, page_size=32)
    long, short = scene.sequence(), scene.sequence()
    assert scene.step({long: 1190, short: 3}) < 2e-5
    for _ in range(3):
        assert scene.step({short: 1, long: 1}) < 2e-5


def test_bfloat16():
    assert worst_of(Scene(CpuBackend(), SPECS["all at once"], page_size=16, dtype=torch.bfloat16)) < 0.05


def test_float16_is_refused():
    reason = CpuBackend.refusal([spec_of()], torch.device("cpu"), torch.float16)
    assert reason is not None and "float16" in reason


@pytest.mark.parametrize("spec", [SPECS["grouped heads"], SPECS["all at once"], spec_of(heads=(9, 9))])
def test_many_single_queries_take_several_heads_at_once(spec):
    """Enough of them for every thread, some with a context of several spans, beside a prompt."""
    scene = Scene(CpuBackend(), spec, page_size=16)
    lengths = [1, 15, 16, 17, 40, 90, 600, 2, 3]
    sequences = [scene.sequence() for _ in lengths]
    assert scene.step(dict(zip(sequences, lengths, strict=True))) < 2e-5
    prompt = scene.sequence()
    assert scene.step({**dict.fromkeys(sequences, 1), prompt: 70}) < 2e-5
    assert scene.step(dict.fromkeys([*sequences, prompt], 1)) < 2e-5


def attended(spec: LayerSpec, chunks: list[int], companions: int) -> torch.Tensor:
    """A sequence computed in chunks, beside others that compute a token each step. -> [sum(chunks), Hq, Dv]"""
    generator = torch.Generator().manual_seed(3)
    query, key, value, sinks = (
        torch.randn(*shape, generator=generator)
        for shape in (
            (sum(chunks), spec.num_heads, spec.head_dim),
            (sum(chunks), spec.num_kv_heads, spec.head_dim),
            (sum(chunks), spec.num_kv_heads, spec.value_dim),
            (spec.num_heads,),
        )
    )
    backend, pages = CpuBackend(), -(-sum(chunks) // 16)
    pool = KVPool([spec], pages + companions, 16, torch.device("cpu"), torch.float32, backend.tokens_first)
    sequences = [Sequence(Request(str(i), (1,), SamplingParams(1)), i, 0) for i in range(1 + companions)]
    for seq in sequences:
        seq.token_ids = [7] * sum(chunks)
    sequences[0].pages = list(range(pages))
    out, start = [], 0
    for step, count in enumerate(chunks):
        others = []
        for index, seq in enumerate(sequences[1:]):
            seq.pages = [pages + index]
            others.append(Part(seq, step % 16, 1, True))
        built = batch.build(Plan((*others, Part(sequences[0], start, count, True)), companions + count), backend, pool)
        mine = slice(first := int(built.first_row[-1]), first + count)
        rows = [torch.randn(companions + count, *x.shape[1:]) for x in (query, key, value)]
        for all_rows, x in zip(rows, (query, key, value), strict=True):
            all_rows[mine] = x[start : start + count]
        with torch.inference_mode():
            out.append(built.attend(0, spec, *rows, sinks if spec.sinks else None)[mine])
        start += count
    return torch.cat(out)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(heads=(9, 3), dims=(64, 64)),
        spec_of(heads=(4, 2), dims=(10, 20), window=300, sinks=True),
        spec_of(window=700, softcap=3.0),
    ],
)
def test_a_query_does_not_depend_on_chunks_and_company(spec):
    """To the last bit: an answer stays the same whatever else runs, and whatever of its prompt was cached."""
    alone = attended(spec, [1300], 0)
    assert torch.equal(attended(spec, [1, 2, 37, 500, 1, 1, 1, 257, 200, 300], 0), alone)
    assert torch.equal(attended(spec, [700, *[1] * 20, 580], 9), alone)


@pytest.mark.parametrize("count", [1, 9])
def test_what_is_not_a_number_is_not_hidden(count):
    """Or a broken sequence would go on with plausible nonsense, instead of failing alone."""
    scene = Scene(CpuBackend(), spec_of(), page_size=16)
    sequences = [scene.sequence() for _ in range(count)]
    assert scene.step(dict.fromkeys(sequences, 20)) < 2e-5
    scene.pool.keys[1][sequences[-1].pages[0], :, 3] = math.nan
    assert scene.step(dict.fromkeys(sequences, 1)) == math.inf
    assert not sequences[:-1] or scene.step(dict.fromkeys(sequences[:-1], 1)) < 2e-5
