"""Families of models: the paged, batched forward gives what transformers' own generate gives, token for token."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.messages import EngineConfig
from engine.model import ModelLoadError
from engine.runner import Runner

from . import tiny_models
from .tiny_models import FAMILIES, Driver, make, random_prompts, reference, runner_of


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family, tmp_path):
    """Together and in chunks; prompts from one token to several pages and beyond every sliding window."""
    folder = make(family, tmp_path / family)
    prompts = random_prompts([1, 7, 16, 17, 40, 61])
    expected = reference(folder, prompts, 8)
    for chunk in (1000, 13):
        driver = Driver(runner_of(folder))
        assert driver.run([driver.sequence(prompt) for prompt in prompts], chunk) == expected, f"chunks of {chunk}"
        assert driver.max_batch == len(prompts)
