"""JSON at the borders: strict in, valid out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.jsontext import MAX_DEPTH, dumps, extend, parse_request, parse_worker
from worker.errors import BadRequest

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize("depth", [1, 100, MAX_DEPTH])
def test_depth_up_to_the_limit_passes(depth: int) -> None:
    parse_request(nested(depth))


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 3000, 1_000_000])
def test_depth_beyond_the_limit_is_refused(depth: int) -> None:
    with pytest.raises(BadRequest):
        parse_request(nested(depth))


def test_brackets_in_strings_are_no_depth() -> None:
    assert parse_request(b'{"a":"' + b"[" * 5000 + b'"}') == {"a": "[" * 5000}
    many = b'{"a":[' + b"[]," * 5000 + b"[]]}"
    assert len(parse_request(many)["a"]) == 5001


@pytest.mark.parametrize("body", [b"{}", b" { } \n", b'{"id":"mine","a":1}', b'{"a":{}}\n'])
def test_extend_adds_keys_and_the_later_wins(body: bytes) -> None:
    expected = {**json.loads(body), "id": 'a"b', "n": 1}
    assert json.loads(extend(body, {"id": 'a"b', "n": 1})) == expected
    assert extend(body, {}) == body


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_extend_on_any_object(value: dict[str, Any]) -> None:
    body = dumps(value)
    assert json.loads(extend(body, {"id": "x"})) == {**json.loads(body), "id": "x"}


def test_what_pythons_json_writes_for_nan_is_read_as_null() -> None:
    assert parse_worker(b'{"a": NaN, "b": [-Infinity, 1.5]}') == {"a": None, "b": [None, 1.5]}
    with pytest.raises(ValueError, match="nested"):
        parse_worker(b"[" * 100_000 + b"NaN" + b"]" * 100_000)
    with pytest.raises(ValueError):
        parse_worker(b"\xff")


@given(VALUES)
def test_what_is_written_is_valid_json(value: Any) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(dumps(value), parse_constant=refuse)


def test_half_surrogate_pairs_and_great_depth_take_the_slow_way() -> None:
    deep: Any = {"x": math.nan, "t": "\ud800"}
    for _ in range(280):
        deep = [deep]
    assert b"null" in dumps(deep)
    assert json.loads(dumps({"t": "\ud800"})) == {"t": "\ud800"}
