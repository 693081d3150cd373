"""Strategies for hypothesis: any JSON that a client can send, and some that only Python can make."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_words = st.sampled_from(["", "\0", "{", "}", "{x}", "user", "text", "function", "auto", "json_schema", "é" * 300])
_scalars = st.none() | st.booleans() | st.integers(-5, 2**63) | st.floats(-3, 3) | st.text(max_size=8) | _words
_hostile = (
    st.floats()
    | st.sampled_from([-(2**63) - 1, 2**64, 10**400])
    | st.text(st.characters(categories=["Cs", "Lu"]), max_size=4)  # lone surrogates among letters
)
_keys = st.text(max_size=6) | st.sampled_from(
    ["role", "content", "type", "text", "name", "function", "arguments", "tool_calls", "id", "parameters", "schema",
     "json_schema", "json", "regex", "choice", "grammar", "mode", "tools", "allowed_tools", "include_usage"]
)  # fmt: skip


def _json(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=5), max_leaves=12
    )


# What a client's JSON library writes, and what only an attacker or a Python caller sends.
plain_json = _json(_scalars)
any_json = plain_json | _json(_scalars | _hostile)
