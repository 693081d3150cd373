"""Building and loading the CPU's kernels."""

from __future__ import annotations

import shutil

import pytest
import torch

from engine import native


@pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="no C++ compiler here")
def test_where_there_is_a_compiler_there_are_kernels():
    """Or all other tests of the kernels would be skipped without a word."""
    assert native.kernels(torch.float32) is not None and native.kernels(torch.bfloat16) is not None


def test_other_dtypes_are_left_to_torch():
    assert native.kernels(torch.float16) is None
