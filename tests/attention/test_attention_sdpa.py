"""The torch backend against a slow dense attention: heads, windows, caps, sinks, lengths of one to several pages."""

from __future__ import annotations

import pytest
import torch

from engine.attention import BackendError, choose
from engine.attention.sdpa import SdpaBackend, split

from .dense import SPECS, Scene, spec_of, worst_of


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_dense_attention(spec, page_size):
    assert worst_of(Scene(SdpaBackend(), spec, page_size=page_size)) < 2e-5


@pytest.mark.parametrize("spec", [SPECS["grouped heads"], SPECS["all at once"]])
def test_small_groups_and_blocks_give_the_same(spec):
    """With limits this small every decode row is its own group and every prefill is cut into blocks of queries."""
    assert worst_of(Scene(SdpaBackend(group_tokens=16, mask_elements=64), spec, page_size=4)) < 2e-5


def test_rows_of_very_different_lengths_do_not_share_a_group():
    assert list(split([40, 40, 38, 5, 5, 1], 10_000)) == [(0, 3), (3, 5), (5, 6)]


def test_groups_are_bounded_by_what_they_gather():
    runs = list(split([10] * 64 + [100], 55))
    assert runs == [(first, min(first + 5, 64)) for first in range(0, 64, 5)] + [(64, 65)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types(dtype):
    assert worst_of(Scene(SdpaBackend(), SPECS["all at once"], page_size=16, dtype=dtype)) < 0.05


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(BackendError, match="'fast'"):
        choose("fast", [spec_of()], torch.device("cpu"), torch.float32)
    assert choose("sdpa", [spec_of()], torch.device("cpu"), torch.float32) is SdpaBackend
