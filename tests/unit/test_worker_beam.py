"""Beam search against a slow, plain reference over a small made-up language."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from engine.messages import FinishReason, SamplingParams, TokenLogprobs
from worker.beam import Beam, BeamOptions, BeamSearch

VOCAB = 7
EOS = 0


class Language:
    """Next-token logprobs that depend on the last two tokens."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.table: dict[tuple[int, ...], list[float]] = {}
        for key in itertools.product(range(-1, VOCAB), repeat=2):
            weights = [rng.random() ** 3 + 1e-3 for _ in range(VOCAB)]
            self.table[key] = [math.log(weight / sum(weights)) for weight in weights]

    def after(self, ids: tuple[int, ...]) -> list[float]:
        return self.table[(-1, -1, *ids)[-2:]]

    def total(self, ids: tuple[int, ...]) -> float:
        return math.fsum(self.after(ids[:end])[token] for end, token in enumerate(ids))


async def search(language: Language, options: BeamOptions, **params: Any) -> list[Beam]:
    async def expand(beam: Beam) -> TokenLogprobs:
        ranked = sorted(enumerate(language.after(beam.token_ids)), key=lambda pair: -pair[1])[: 2 * options.width]
        ids, values = zip(*ranked, strict=True)
        return TokenLogprobs((ids[0], *ids), (values[0], *values), 1)

    return await BeamSearch(options, SamplingParams(**params)).run(expand)


def all_texts(max_tokens: int) -> list[tuple[int, ...]]:
    """Every text that ends with EOS or by its length."""
    ended = [(*body, EOS) for length in range(max_tokens) for body in itertools.product(range(1, VOCAB), repeat=length)]
    return ended + list(itertools.product(range(1, VOCAB), repeat=max_tokens))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
async def test_a_wide_beam_finds_the_best_text_of_all(seed: int, length_penalty: float) -> None:
    language = Language(seed)
    max_tokens = 4
    options = BeamOptions(n=1, width=VOCAB**max_tokens, length_penalty=length_penalty, early_stopping="never")
    best, *_ = await search(language, options, max_tokens=max_tokens, stop_token_ids=frozenset([EOS]))
    scores = {ids: language.total(ids) / len(ids) ** length_penalty for ids in all_texts(max_tokens)}
    assert scores[best.token_ids] == pytest.approx(max(scores.values()))
    assert best.total == pytest.approx(language.total(best.token_ids))


@pytest.mark.parametrize("seed", range(6))
async def test_beams_are_ranked_distinct_and_complete(seed: int) -> None:
    options = BeamOptions(n=3, width=3)
    beams = await search(Language(seed), options, max_tokens=8, stop_token_ids=frozenset([EOS]))
    assert len(beams) >= 3 and len({beam.token_ids for beam in beams}) == len(beams)
    scores = [beam.score(1.0) for beam in beams]
    assert scores == sorted(scores, reverse=True)
    for beam in beams:
        ended = beam.token_ids[-1] == EOS
        assert beam.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert EOS not in beam.token_ids[:-1] and (ended or len(beam.token_ids) == 8)
        assert beam.stop_token_id == (EOS if ended else None)
        assert len(beam.logprobs) == len(beam.token_ids)


async def test_a_beam_of_one_is_greedy() -> None:
    language = Language(3)
    beam, *_ = await search(language, BeamOptions(n=1, width=1), max_tokens=10)
    ids: tuple[int, ...] = ()
    while len(ids) < 10:
        after = language.after(ids)
        ids = (*ids, after.index(max(after)))
    assert beam.token_ids == ids


async def test_early_stopping_and_min_tokens() -> None:
    counts = {}
    for early_stopping in (True, False, "never"):
        options = BeamOptions(n=2, width=2, length_penalty=1.0, early_stopping=early_stopping)
        beams = await search(Language(1), options, max_tokens=40, stop_token_ids=frozenset([EOS]))
        counts[early_stopping] = (beams[0].score(1.0), len(beams[0].token_ids))
    # The longer the search, the better the best.
    assert counts[True][0] <= counts[False][0] <= counts["never"][0]
    options = BeamOptions(n=2, width=2)
    beams = await search(Language(1), options, max_tokens=9, min_tokens=6, stop_token_ids=frozenset([EOS]))
    assert all(len(beam.token_ids) > 6 for beam in beams)
