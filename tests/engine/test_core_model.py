"""EngineCore with a real (tiny, random) model: the answer does not depend on chunks, company, cache or preemption,
greedy or sampled, and equals transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine import native
from engine.messages import Request, SamplingParams
from engine.runner import Runner
from tests.engine import tiny_models
from tests.fakes.driver import Driver

needs_compiler = pytest.mark.skipif(native.kernels(torch.float32) is None, reason="needs a C++ compiler")
LENGTHS = [3, 17, 40, 64, 5, 33]
NUM_OUTPUT = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_models.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two of them begin alike, page borders included."""
    prompts = tiny_models.random_prompts(LENGTHS)
    return [*prompts, prompts[3] + [7, 7], prompts[3]]


def requests(prompts: list[list[int]], **params: Any) -> Iterator[Request]:
    for index, prompt in enumerate(prompts):
        yield Request(f"r{index}", tuple(prompt), SamplingParams(NUM_OUTPUT, **params))


def outputs(runner: Runner, prompts: list[list[int]], params: dict[str, Any], **config: Any) -> list[list[int]]:
    driver = Driver(runner, **config)  # type: ignore[arg-type]
    driver.send(*requests(prompts, **params))
    driver.run(5000)
    driver.check_idle()
    return [driver.tokens(f"r{index}") for index in range(len(prompts))]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 3},
        # Of a random model all tokens are about as likely, and the smallest difference of a logit would be seen.
        pytest.param({"temperature": 1.0, "seed": 3}, marks=needs_compiler),
    ],
    ids=["greedy", "sampled", "sampled from all"],
)
def test_same_answers_whatever_the_schedule(folder: Any, prompts: list[list[int]], params: dict[str, Any]) -> None:
    runner, small = tiny_models.runner_of(folder), tiny_models.runner_of(folder, num_pages=9)
    together = outputs(runner, prompts, params)
    if params["temperature"] == 0:
        assert together == tiny_models.reference(folder, prompts, NUM_OUTPUT)
    assert together == [outputs(runner, [prompt], params)[0] for prompt in prompts]
    assert together == outputs(runner, prompts, params, enable_prefix_caching=False)
    assert together == outputs(runner, prompts, params, max_num_batched_tokens=7)
    assert together == outputs(runner, prompts, params, max_num_batched_tokens=1, max_num_seqs=2)
    assert together == outputs(small, prompts, params)


def test_the_schedules_above_share_steps_and_preempt(folder: Any, prompts: list[list[int]]) -> None:
    for num_pages, preempts in ((200, False), (9, True)):
        driver = Driver(tiny_models.runner_of(folder, num_pages=num_pages))  # type: ignore[arg-type]
        driver.send(*requests(prompts, temperature=0.0))
        driver.run(5000)
        stats = driver.core.stats()
        assert (stats.num_preemptions > 0) == preempts
        assert stats.max_batch == len(prompts) or preempts
