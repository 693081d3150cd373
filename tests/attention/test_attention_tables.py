"""The page tables that kernels on a device are given: a slow stand-in that follows them equals the dense attention."""

from __future__ import annotations

import pytest
import torch

from engine.attention import BackendError, choose
from engine.attention.tables import TableBackend

from .dense import SPECS, Scene, dense_attention, spec_of, worst_of


class SlowKernel(TableBackend):
    """Does with a plan what flash-attn's kernels are documented to do with it."""

    name = "slow"

    def attend(self, spec, query, keys, values, plan):
        assert plan.cu_q.dtype == plan.cu_k.dtype == plan.kv_len.dtype == plan.page_table.dtype == torch.int32
        assert plan.max_k == plan.kv_len.max() and plan.max_q == plan.cu_q.diff().max()
        assert torch.equal(plan.cu_k.diff(), plan.kv_len)
        out = torch.empty_like(query)
        for part, (first, last) in enumerate(zip(plan.cu_q[:-1].tolist(), plan.cu_q[1:].tolist(), strict=True)):
            kv_len = int(plan.kv_len[part])
            k, v = (pages[plan.page_table[part].long()].flatten(0, 1)[:kv_len] for pages in (keys, values))
            start = kv_len - (last - first)  # the last query sees the last key
            out[first:last] = dense_attention(query[first:last], k, v, start, spec, None)
        return out


@pytest.mark.parametrize("spec", [SPECS["grouped heads"], SPECS["window over pages"]])
def test_tables_lead_to_the_right_keys(spec):
    assert worst_of(Scene(SlowKernel(), spec, page_size=16)) < 2e-5


@pytest.mark.parametrize(
    ("spec", "device", "dtype", "reason"),
    [
        (spec_of(), "cpu", torch.bfloat16, "CUDA"),
        (spec_of(), "cuda", torch.float32, "float32"),
        (spec_of(sinks=True), "cuda", torch.bfloat16, "sinks"),
        (spec_of(dims=(12, 12)), "cuda", torch.bfloat16, "12"),
        (spec_of(dims=(264, 264)), "cuda", torch.bfloat16, "264"),
        (spec_of(dims=(16, 8)), "cuda", torch.bfloat16, "16 and 8"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(spec, device, dtype, reason):
    assert reason in SlowKernel.refusal([spec], torch.device(device), dtype)


def test_a_backend_whose_package_is_missing_is_named():
    pytest.importorskip("torch")
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        with pytest.raises(BackendError, match="flash needs the package flash_attn"):
            choose("flash", [spec_of()], torch.device("cuda"), torch.bfloat16)


def test_on_a_gpu_every_layer_finds_a_backend():
    """Sinks and soft caps leave torch's matmuls: slower, never refused under "auto"."""
    assert choose("auto", [spec_of(sinks=True)], torch.device("cuda"), torch.bfloat16).name == "sdpa"
