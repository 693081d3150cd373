"""Whole models on a CUDA device: the same tokens as on a CPU in float32, and every backend that is installed."""

from __future__ import annotations

import pytest
import torch

from tests.engine.tiny_models import Driver, make, random_prompts, reference, runner_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "gemma2", "gpt-oss", "gpt2", "phi3-window"])
def test_greedy_equals_generate(family, tmp_path):
    folder = make(family, tmp_path)
    prompts = random_prompts([1, 16, 17, 61])
    expected = reference(folder, prompts, 8)
    for chunk in (1000, 13):
        driver = Driver(runner_of(folder, device="cuda"))
        assert driver.run([driver.sequence(prompt) for prompt in prompts], chunk) == expected


def test_sampling_repeats_and_does_not_depend_on_the_batch(tmp_path):
    runner = runner_of(make("llama", tmp_path), device="cuda")
    kinds = [dict(temperature=1.0), dict(top_p=0.7, temperature=1.0), dict(repetition_penalty=1.2), dict(top_k=3)]
    prompts = random_prompts([5, 9, 30, 2])
    alone = []
    for seed, (kind, prompt) in enumerate(zip(kinds, prompts, strict=True)):
        driver = Driver(runner)
        alone += driver.run([driver.sequence(prompt, seed=seed, logprobs=2, **kind)])
    driver = Driver(runner)
    seqs = [driver.sequence(prompts[i], seed=i, logprobs=2, **kinds[i]) for i in range(4)]
    assert driver.run(seqs, chunk=7) == alone


def test_pool_follows_the_utilization(tmp_path):
    folder = make("llama", tmp_path)
    small, large = (
        runner_of(folder, device="cuda", num_pages=None, max_num_seqs=10**6, gpu_memory_utilization=share).info
        for share in (0.2, 0.4)
    )
    assert 0 < small.num_pages < large.num_pages


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_chosen_backend_serves_16_bits(tmp_path, dtype):
    runner = runner_of(make("qwen2", tmp_path), device="cuda", dtype=dtype)
    driver = Driver(runner)
    outputs = driver.run([driver.sequence(prompt) for prompt in random_prompts([5, 40])])
    assert [len(tokens) for tokens in outputs] == [8, 8]
