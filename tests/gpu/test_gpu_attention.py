"""The backends for CUDA devices against the slow dense attention, on a device."""

from __future__ import annotations

import pytest
import torch

from engine.attention import BackendError, choose
from tests.attention.dense import SPECS, Scene, worst_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["sdpa", "flash", "varlen"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_dense_attention(spec, name, dtype):
    try:
        backend = choose(name, [spec], torch.device("cuda"), dtype)
    except BackendError as error:
        pytest.skip(str(error))
    scene = Scene(backend(), spec, page_size=backend.default_page_size, device="cuda", dtype=dtype)
    assert worst_of(scene) < (1e-3 if dtype == torch.float32 else 0.06)
