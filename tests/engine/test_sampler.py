"""The sampler against a slow one that sorts the whole vocabulary, and its draws against the exact distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine import sampler
from engine.sampler import Sampling, sample, stream_key, uniforms


def row(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0) -> Sampling:
    return Sampling(temperature, top_k, top_p, min_p, stream_key(seed, choice))


def slow_distribution(logits: list[float], how: Sampling) -> np.ndarray:
    """By sorting: top-k, then top-p of what is left, then min-p. Tokens that tie with the last one stay."""
    values = np.array(logits, dtype=np.float64)
    weights = np.exp((values - values.max()) / how.temperature)
    if 0 < how.top_k < len(weights):
        weights[weights < np.sort(weights)[-how.top_k]] = 0.0
    if how.top_p < 1.0:
        ordered = np.sort(weights)[::-1]
        needed = int(np.argmax(np.cumsum(ordered) >= how.top_p * weights.sum() * (1 - 1e-12)))
        weights[weights < ordered[needed]] = 0.0
    weights[weights < how.min_p] = 0.0
    return weights / weights.sum()


def fast_distribution(logits: torch.Tensor, how: Sampling) -> np.ndarray:
    weights = sampler.weigh(logits[None], logits.max()[None], torch.tensor([how.temperature]))
    sampler.truncate(weights, [how])
    return (weights / weights.sum())[0].double().numpy()


@pytest.mark.parametrize("vocab_size", [5, 300, 1111])
@pytest.mark.parametrize(
    "how",
    [
        row(),
        row(temperature=0.3),
        row(top_k=1),
        row(top_k=7),
        row(top_k=200),
        row(top_k=10**6),
        row(top_p=0.0),
        row(top_p=0.4),
        row(top_p=0.999),
        row(temperature=5.0, top_p=0.95),  # flat: the first candidates do not reach it
        row(min_p=0.2),
        row(temperature=1.7, top_k=90, top_p=0.8, min_p=0.05),
        row(top_k=3, top_p=0.7),
    ],
)
def test_truncation_equals_sorting_the_vocabulary(vocab_size, how):
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    expected = slow_distribution(logits.tolist(), how)
    found = fast_distribution(logits, how)
    assert ((found > 0) == (expected > 0)).all()
    assert np.abs(found - expected).max() < 1e-6


def test_top_p_falls_back_to_the_whole_vocabulary():
    """A flat distribution of 5,000 tokens needs 4,500 of them: more than any number of candidates."""
    logits = torch.linspace(0, 1e-3, 5000)
    peaked = torch.linspace(0, 300, 5000)
    weights = sampler.weigh(torch.stack([logits, peaked]), torch.stack([logits[-1], peaked[-1]]), torch.ones(2))
    sampler.truncate(weights, [row(top_p=0.9), row(top_p=0.9)])
    assert abs(int((weights[0] > 0).sum()) - 4500) <= 3
    assert int((weights[1] > 0).sum()) == int((slow_distribution(peaked.tolist(), row(top_p=0.9)) > 0).sum())


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 30.0])
def test_top_p_is_exact_for_flat_and_peaked_rows_together(spread, top_p):
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(7)) * spread
    logits[1] = logits[1].round(decimals=1)  # many ties
    logits[2, 10:] = -torch.inf
    weights = sampler.weigh(logits, logits.max(1).values, torch.ones(4))
    sampler.truncate(weights, [row(top_p=top_p)] * 4)
    for found, values in zip(weights, logits, strict=True):
        # From the weights as they are: in float32 the slow way and the fast way must see the same numbers.
        whole = (values - values.max()).exp()
        ordered = whole.sort(descending=True).values.double()
        needed = int((ordered.cumsum(0) < top_p * ordered.sum() * (1 - 1e-13)).sum())
        assert torch.equal(found > 0, (whole >= ordered[min(needed, 2999)].float()) & (whole > 0))


def test_rows_of_a_batch_are_drawn_as_if_alone():
    """Greedy, hot, truncated and tiny temperatures share a batch; every row draws what it draws alone."""
    generator = torch.Generator().manual_seed(3)
    hows = [
        row(temperature=0.0), row(seed=5), row(temperature=1e-10), row(top_k=2, seed=1), row(top_p=0.5, seed=2),
        row(min_p=0.3, seed=3), row(temperature=2.0, top_k=200, seed=4), row(top_p=0.99, temperature=9.0, seed=8),
    ]  # fmt: skip
    logits = torch.randn(len(hows), 3000, generator=generator) * 4
    positions = list(range(len(hows)))
    together, best = sample(logits.clone(), hows, positions)
    alone = [sample(logits[i : i + 1].clone(), [hows[i]], [positions[i]])[0].item() for i in range(len(hows))]
    assert together.tolist() == alone and best.isfinite().all()
    assert together[0] == logits[0].argmax() and together[2] == logits[2].argmax()
    order = torch.randperm(len(hows), generator=generator).tolist()
    shuffled, _ = sample(logits[order].clone(), [hows[i] for i in order], [positions[i] for i in order])
    assert shuffled.tolist() == [alone[i] for i in order]


def test_tiny_temperature_beside_greedy_rows_gives_no_nan():
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 3)
    ids, best = sample(logits, [row(temperature=0.0), row(seed=5), row(temperature=1e-10)], [0, 0, 0])
    assert ids[0] == 1 and ids[2] == 1 and best.isfinite().all()
    weights = sampler.weigh(logits, logits.max(1).values, torch.tensor([1e-30, 1.0, 1e-10]))
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("top_k", [0, 49152, 1_000_000])
def test_top_k_off_has_one_meaning(top_k):
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(1))
    expected = sample(logits.clone(), [row(seed=9)], [3])[0]
    assert sample(logits.clone(), [row(seed=9, top_k=top_k)], [3])[0] == expected


def test_top_k_1_is_greedy_even_among_equals():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0]])
    assert all(sample(logits.clone(), [row(top_k=1, seed=seed)], [0])[0] == 1 for seed in range(20))


def test_greedy_takes_the_first_of_equal_logits_wherever_the_row_is():
    """Checkpoints in 16 bits tie often; the choice must not depend on the row's place or the batch."""
    logits = torch.randint(0, 4, (33, 49152), generator=torch.Generator().manual_seed(0)).float()
    ids, _ = sample(logits, [row(temperature=0.0)] * 33, [0] * 33)
    assert ids.tolist() == [r.index(max(r)) for r in logits.tolist()]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(broken):
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    expected, _ = sample(logits.clone(), [row(seed=1), row(temperature=0.0), row(seed=2)], [0, 0, 0])
    logits[1, 77] = broken
    ids, best = sample(logits, [row(seed=1), row(temperature=0.0), row(seed=2)], [0, 0, 0])
    assert best.isfinite().tolist() == [True, False, True]
    assert ids[0] == expected[0] and ids[2] == expected[2]


def test_a_row_with_every_token_masked_fails_and_one_with_a_single_token_takes_it():
    logits = torch.full((2, 400), -math.inf)
    logits[1, 123] = -50.0
    ids, best = sample(logits, [row(), row(temperature=1.5, top_p=0.5)], [0, 0])
    assert best.isfinite().tolist() == [False, True] and ids[1] == 123


@pytest.mark.parametrize("vocab_size", [3, 256, 257, 1000])
@pytest.mark.parametrize("how", [row(), row(temperature=0.7, top_p=0.9), row(top_k=2)])
def test_draws_follow_the_distribution(vocab_size, how):
    """Chi-square over 20,000 draws; the quantile is Wilson and Hilferty's, at one false alarm in 100,000."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 1.5
    expected = slow_distribution(logits.tolist(), how)
    num_draws = 20_000
    weights = sampler.weigh(logits[None], logits.max()[None], torch.tensor([how.temperature]))
    sampler.truncate(weights, [how])
    uniform = torch.from_numpy(uniforms([stream_key(11, 0)] * num_draws, range(num_draws)))
    found = np.concatenate([sampler.draw(weights.expand(len(part), -1), part).numpy() for part in uniform.split(1000)])
    counts = np.bincount(found, minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    often = expected * num_draws >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * num_draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    limit = degrees * (1 - 2 / (9 * degrees) + 4.26 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < limit


def test_the_ends_of_the_unit_interval_draw_tokens_of_positive_weight():
    weights = torch.zeros(2, 1000)
    weights[:, 300:310] = 0.1
    ids = sampler.draw(weights, torch.tensor([2.0**-54, 1 - 2.0**-54], dtype=torch.float64))
    assert ids.tolist() == [300, 309]


def test_uniforms_are_uniform_and_unrelated_between_seeds_choices_and_positions():
    streams = [uniforms([stream_key(seed, choice)] * 4000, range(4000)) for seed in (0, 1, -1) for choice in (0, 1)]
    for stream in streams:
        assert stream.min() > 0 and stream.max() < 1
        assert abs(stream.mean() - 0.5) < 0.02 and abs(stream.var() - 1 / 12) < 0.005
    correlation = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlation).max() < 0.08
    neighbours = uniforms([stream_key(seed, 0) for seed in range(4000)], [0] * 4000)
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 0.08


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 - 1, -(2**63)])
def test_any_64_bit_seed_draws_and_repeats(seed):
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))
    first, again = (
        [sample(logits.clone(), [row(temperature=2.0, seed=seed)], [position])[0].item() for position in range(8)]
        for _ in range(2)
    )
    other = [sample(logits.clone(), [row(temperature=2.0, seed=seed, choice=1)], [p])[0].item() for p in range(8)]
    assert first == again and first != other
