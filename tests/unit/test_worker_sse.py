"""What goes on the wire is strict JSON in valid UTF-8, framed as events."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.strategies import any_json
from worker.protocol import sse


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_events_are_framed() -> None:
    assert sse.event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'
    assert sse.DONE == "data: [DONE]\n\n"
    assert sse.comment("keep-alive") == ": keep-alive\n\n"


def test_numbers_of_numpy_and_non_finite_numbers() -> None:
    value = {"tokens": np.int64(5), "logprob": np.float32(-0.5), "nan": math.nan, "inf": -math.inf}
    assert strict(sse.dumps(value)) == {"tokens": 5, "logprob": -0.5, "nan": None, "inf": None}


@pytest.mark.parametrize(
    ("text", "sent"),
    [("a\ud83d", "a\ufffd"), ("\udd8ab", "\ufffdb"), ("\ud83e\udd8a", "🦊"), ("x\0", "x\0"), ("🦊", "🦊")],
)
def test_half_a_surrogate_pair_never_leaves(text: str, sent: str) -> None:
    assert strict(sse.dumps({"text": [text], text: 1})) == {"text": [sent], sent: 1}
    assert sse.jsonable({"text": text}) == {"text": sent}


def has_huge_int(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_huge_int, value.values()))
    if isinstance(value, list):
        return any(map(has_huge_int, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


@settings(deadline=None)
@given(any_json.filter(lambda value: not has_huge_int(value)))
def test_anything_is_sent_as_one_line_of_strict_json(value: Any) -> None:
    event = sse.event(value)
    assert event.startswith("data: ") and event.endswith("\n\n") and "\n" not in event[:-2]
    event.encode()
    json.dumps(strict(event[6:]), allow_nan=False).encode()


@given(st.text() | st.dictionaries(st.text(), st.floats(-1e6, 1e6) | st.text()))
def test_what_json_can_carry_arrives_unchanged(value: Any) -> None:
    assert strict(sse.dumps(value)) == value
