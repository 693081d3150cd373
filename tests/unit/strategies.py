"""Strategies for hypothesis: any JSON that a client can send, and some that only Python can make."""

from __future__ import annotations

from hypothesis import strategies as st

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 200)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.text(st.characters(categories=["Cs", "Lu"]), max_size=4)  # lone surrogates among letters
    | st.sampled_from(["", "\0", "{", "}", "{x}", "user", "text", "function", "auto", "json_schema", "é" * 300])
)
keys = st.text(max_size=6) | st.sampled_from(
    ["role", "content", "type", "text", "name", "function", "arguments", "tool_calls", "id", "parameters", "schema",
     "json_schema", "json", "regex", "choice", "grammar", "mode", "tools", "allowed_tools", "include_usage"]
)  # fmt: skip
any_json = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=12
)
