"""Logprobs in OpenAI's shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from engine.messages import TokenLogprobs
from worker.logprobs import CompletionLogprobs, LogprobFormat, joined
from worker.tokenizer import Tokenizer

HELLO, WORLD, FOX = 19556, 905, (10813, 116, 228)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)


def position(token: int, *top: tuple[int, float], logprob: float = -1.0, rank: int = 1) -> TokenLogprobs:
    return TokenLogprobs((token, *(t for t, _ in top)), (logprob, *(p for _, p in top)), rank)


def test_chat_entries_hold_exactly_the_top_n(tokenizer: Tokenizer) -> None:
    form = LogprobFormat(tokenizer, 2)
    (entry,) = form.chat([position(HELLO, (HELLO, -1.0), (WORLD, -2.0), (30, -3.0))])
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("Hello", -1.0, list(b"Hello"))
    assert [top["token"] for top in entry["top_logprobs"]] == ["Hello", " world"]
    assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


def test_no_alternatives_is_an_empty_list(tokenizer: Tokenizer) -> None:
    (entry,) = LogprobFormat(tokenizer, 0).chat([position(HELLO, (HELLO, -1.0))])
    assert entry["top_logprobs"] == []


def test_whole_vocabulary_and_ids_by_name(tokenizer: Tokenizer) -> None:
    everything = position(HELLO, (30, -0.5), (HELLO, -1.0), (WORLD, -2.0))
    assert len(LogprobFormat(tokenizer, -1).chat([everything])[0]["top_logprobs"]) == 3
    # Two ids were asked for by name; one of them is among the top 1 already and stands once.
    named = position(HELLO, (30, -0.5), (30, -0.5), (WORLD, -2.0))
    (entry,) = LogprobFormat(tokenizer, 1).chat([named], num_extra=2)
    assert [top["token"] for top in entry["top_logprobs"]] == [".", " world"]


def test_bytes_of_a_split_character(tokenizer: Tokenizer) -> None:
    entries = LogprobFormat(tokenizer, 0).chat([position(token) for token in FOX])
    assert [entry["bytes"] for entry in entries] == [[240, 159], [166], [138]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "🦊"


def test_impossible_tokens_are_finite(tokenizer: Tokenizer) -> None:
    bad = position(HELLO, (WORLD, -math.inf), logprob=math.nan)
    form = LogprobFormat(tokenizer, 1)
    for value in (form.chat([bad]), CompletionLogprobs(form).block([HELLO], [bad]), form.prompt([bad], 1)):
        assert "-9999.0" in json.dumps(value, allow_nan=False)


def test_completion_blocks_go_on_where_the_last_ended(tokenizer: Tokenizer) -> None:
    form = LogprobFormat(tokenizer, 1)
    state = CompletionLogprobs(form)
    first = state.block([HELLO, *FOX], [None, *[position(token, (WORLD, -2.0)) for token in FOX]])
    second = state.block([WORLD, 2], [position(WORLD, (WORLD, -1.0)), position(2, (2, -1.0))], hidden=frozenset([2]))
    assert first["token_logprobs"][0] is None and first["top_logprobs"][0] is None
    assert first["text_offset"] == [0, 5, 6, 6]
    assert second["text_offset"] == [6, 12]
    assert first["top_logprobs"][1].keys() == {"bytes:\\xf0\\x9f", " world"}  # the sampled token is always there
    assert joined([first, second])["tokens"] == first["tokens"] + second["tokens"]


def test_tokens_as_ids(tokenizer: Tokenizer) -> None:
    form = LogprobFormat(tokenizer, 1, as_token_ids=True)
    assert form.chat([position(HELLO, (WORLD, -2.0))])[0]["token"] == f"token_id:{HELLO}"
    block = CompletionLogprobs(form).block([HELLO], [position(HELLO, (WORLD, -2.0))])
    assert block["tokens"] == [f"token_id:{HELLO}"] and f"token_id:{WORLD}" in block["top_logprobs"][0]


def test_prompt_logprobs_have_the_actual_token_and_ranks(tokenizer: Tokenizer) -> None:
    actual = position(HELLO, (WORLD, -0.5), (30, -0.7), logprob=-9.0, rank=77)
    first, second = LogprobFormat(tokenizer, 0).prompt([None, actual], 1)
    assert first is None and second is not None
    assert second[str(HELLO)] == {"logprob": -9.0, "rank": 77, "decoded_token": "Hello"}
    assert second[str(WORLD)] == {"logprob": -0.5, "rank": 1, "decoded_token": " world"}
    assert len(second) == 2
