"""The runner as a whole: a sequence's tokens depend neither on its company nor on how its prompt is cut."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.messages import RequestError, TokenLogprobs

from .tiny_models import Driver, make, random_prompts, reference, runner_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runner(folder):
    return runner_of(folder)


@pytest.mark.slow
def test_demo_model_equals_generate(demo_model):
    prompts = random_prompts([1, 9, 31, 64, 130, 257], vocab_size=40_000, seed=4)
    expected = reference(demo_model, prompts, 12)
    driver = Driver(runner_of(demo_model, num_pages=100))
    seqs = [driver.sequence(prompt, max_tokens=12) for prompt in prompts]
    assert driver.run(seqs, chunk=100) == expected and driver.max_batch == len(prompts)


def test_chunks_of_any_size_give_the_same_tokens(runner):
    prompts = random_prompts([3, 50, 17])
    expected = Driver(runner).run([Driver(runner).sequence(prompt) for prompt in prompts])
    for chunk in (1, 7, 16, 40):
        driver = Driver(runner, seed=chunk)
        assert driver.run([driver.sequence(prompt) for prompt in prompts], chunk) == expected


def test_a_prompt_over_shared_pages_gives_the_same_tokens(runner):
    """A second sequence takes the first one's pages of the common prefix and computes the rest in chunks."""
    prefix, tail, other = random_prompts([48, 20, 9], seed=2)
    driver = Driver(runner)
    expected = driver.run([driver.sequence(prefix + tail), driver.sequence(prefix + other)])
    driver = Driver(runner, seed=1)
    first = driver.sequence(prefix + tail)
    driver.run([first])
    second = driver.sequence(prefix + other)
    second.pages, second.num_computed = first.pages[:3], 48
    third = driver.sequence(prefix + tail)
    third.pages, third.num_computed = first.pages[:4], 64
    assert driver.run([second, third], chunk=3) == [expected[1], expected[0]]


def test_a_preempted_sequence_goes_on_with_the_same_tokens(runner):
    """Its pages are gone and its state forgotten in mid-sentence; prompt and output are computed again."""
    params = dict(max_tokens=20, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.2)
    [prompt] = random_prompts([21])
    driver = Driver(runner)
    expected = driver.run([driver.sequence(prompt, seed=5, **params)])
    again = driver.sequence(prompt, seed=5, **params)
    for step in range(12):
        driver.step([again], 100)
        if step == 7:
            runner.forget(again)
            assert again.sampling_state is None
            again.pages, again.num_computed = [], 0
    assert driver.run([again], 9) == expected


def test_sampled_tokens_do_not_depend_on_the_batch(runner):
    kinds = [
        dict(temperature=1.0), dict(temperature=0.0), dict(temperature=1.5, top_p=0.8), dict(temperature=1.0, top_k=5),
        dict(temperature=0.8, min_p=0.1), dict(temperature=1.0, frequency_penalty=0.5, logit_bias=((7, 3.0),)),
    ]  # fmt: skip
    prompts = random_prompts([5, 20, 33, 1, 16, 8])
    alone = []
    for seed, (kind, prompt) in enumerate(zip(kinds, prompts, strict=True)):
        driver = Driver(runner)
        alone += driver.run([driver.sequence(prompt, seed=seed, **kind)])
    driver = Driver(runner, seed=9)
    seqs = [driver.sequence(prompts[i], seed=i, **kinds[i]) for i in (4, 0, 3, 5, 1, 2)]
    assert driver.run(seqs, chunk=11) == [alone[i] for i in (4, 0, 3, 5, 1, 2)]
    assert driver.max_batch == len(kinds)


def test_choices_of_one_seed_differ_and_repeat(runner):
    [prompt] = random_prompts([6])

    def draw(seed: int) -> list[list[int]]:
        driver = Driver(runner)
        return driver.run([driver.sequence(prompt, seed, choice, temperature=1.2) for choice in range(3)])

    first = draw(7)
    assert first == draw(7) and len({tuple(tokens) for tokens in first}) > 1
    assert draw(0) != first and draw(-1) == draw(-1)


def exact_logprobs(folder, tokens: list[int]) -> torch.Tensor:
    """[n, V]: row i is the distribution of token i + 1"""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)


def check_entry(entry: TokenLogprobs, exact: torch.Tensor, token: int, top: int, extra: tuple[int, ...] = ()) -> None:
    best = exact.topk(top).indices.tolist()
    assert entry.token_ids == (token, *best, *extra)
    assert torch.allclose(torch.tensor(entry.logprobs).double(), exact[list(entry.token_ids)], atol=1e-4)
    assert entry.rank == int((exact > exact[token]).sum()) + 1


def test_logprobs_are_of_the_raw_distribution(folder, runner):
    """Whatever truncates, biases or masks the draw."""
    [prompt] = random_prompts([11])
    for params in (
        dict(temperature=0.0), dict(temperature=1.0, top_p=0.5), dict(temperature=2.0, top_k=1),
        dict(temperature=1.0, logit_bias=((4, 100.0),)), dict(temperature=1.0, allowed_token_ids=(8, 9)),
    ):  # fmt: skip
        driver = Driver(runner)
        seq, plain = driver.sequence(prompt, logprobs=3, logprob_token_ids=(5,), **params), driver.sequence(prompt)
        outputs = driver.run([plain, seq])
        exact = exact_logprobs(folder, prompt + outputs[1])
        entries = [result.logprobs for result in driver.sampled if result.seq is seq]
        for position, (token, [entry]) in enumerate(zip(outputs[1], entries, strict=True)):
            check_entry(entry, exact[len(prompt) - 1 + position], token, 3, (5,))
        assert all(result.logprobs is None for result in driver.sampled if result.seq is plain)


@pytest.mark.parametrize("chunk", [16, 32, 128])
def test_prompt_logprobs_do_not_depend_on_the_chunks(folder, runner, chunk):
    prompts = random_prompts([70, 1, 33])
    driver = Driver(runner)
    seqs = [driver.sequence(prompt, max_tokens=1, prompt_logprobs=2) for prompt in prompts[:2]]
    seqs.append(driver.sequence(prompts[2], max_tokens=0, prompt_logprobs=0))  # nothing is generated
    driver.run(seqs, chunk)
    for seq, top in zip(seqs, (2, 2, 0), strict=True):
        assert len(seq.prompt_logprobs) == seq.num_prompt and seq.prompt_logprobs[0] is None
        exact = exact_logprobs(folder, seq.token_ids[: seq.num_prompt])
        for position in range(1, seq.num_prompt):
            check_entry(seq.prompt_logprobs[position], exact[position - 1], seq.token_ids[position], top)
    assert [seq.num_output for seq in seqs] == [1, 1, 0]


def test_a_row_that_is_not_finite_ends_alone(tmp_path):
    """One token's embedding is broken: whoever has it in the prompt fails, the others are served."""
    folder = make("llama", tmp_path)
    runner = runner_of(folder)
    prompts = [[5, 6, 7], [5, 99, 7], [8, 9]]
    driver = Driver(runner)
    expected = driver.run([driver.sequence(prompts[0]), driver.sequence(prompts[2])])
    runner.model.hf.get_input_embeddings().weight.data[99] = torch.nan
    driver = Driver(runner)
    seqs = [
        driver.sequence(prompt, temperature=temperature) for prompt, temperature in zip(prompts, (0, 1, 0), strict=True)
    ]
    results = driver.step(seqs, 100)
    assert [result.token_ids == [] for result in results] == [False, True, False]
    assert isinstance(results[1].error, RequestError) and results[1].error.code == "internal_error"
    assert driver.run([seqs[0], seqs[2]]) == expected


def test_pool_size_follows_the_settings(folder):
    one_page = 3 * 2 * 16 * 16 * 2 * 4  # layers, kv heads, tokens, head size, keys and values, bytes
    assert runner_of(folder, num_pages=7).info.num_pages == 7
    assert runner_of(folder, num_pages=None, kv_cache_memory_bytes=10 * one_page + 5).info.num_pages == 10
    default = runner_of(folder, num_pages=None, max_num_seqs=3).info
    assert default.num_pages == 3 * 256 // 16  # no more than all sequences at full length can use
    assert runner_of(folder, page_size=32, num_pages=None, max_num_seqs=3).info.num_pages == 3 * 256 // 32
