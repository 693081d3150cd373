"""JSON text and server-sent event framing. What leaves here is always valid JSON in valid UTF-8.

Non-finite numbers become null (builders write -9999.0 where OpenAI's clients expect a number), half surrogate
pairs become U+FFFD, numpy scalars become numbers.
"""

from __future__ import annotations

from typing import Any

import orjson

DONE = "data: [DONE]\n\n"


def dumps(value: Any) -> str:
    """Compact JSON text of an answer."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:  # orjson's word for text that is not Unicode
        return orjson.dumps(_well_formed(value), option=orjson.OPT_SERIALIZE_NUMPY).decode()


def event(value: Any) -> str:
    """One whole event."""
    return f"data: {dumps(value)}\n\n"


def comment(text: str) -> str:
    """A line that clients skip; it keeps the connection alive."""
    return f": {text}\n\n"


def jsonable(value: Any) -> Any:
    """`value` as plain JSON data, for an answer that is handed on as an object rather than as text."""
    return orjson.loads(dumps(value))


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_well_formed(entry) for entry in value]
    return value
