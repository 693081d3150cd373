"""JSON read while it is still being written.

Models write almost JSON: a raw new line in a string, a closing bracket left out, a comma before a closing bracket,
Python's True, False and None. Copying repairs exactly these, so that what a client puts together can be parsed;
everything else passes as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from worker.parsers.source import Source, Steps

_CLOSING = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^-+.\w"{}\[\],<`]*')
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.\w]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}


def escape(text: str) -> str:
    """`text` as the inside of a JSON string. Escaping piece by piece gives the same as escaping the whole."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def loads(text: str) -> Any:
    """Strict JSON. Raises ValueError, also for what Python alone takes: NaN, Infinity, endless nesting and digits."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def copy_value(source: Source, emit: Callable[[str], None], ends: tuple[str, ...] = ()) -> Steps[bool]:
    """Copies the one value that comes next, as it comes. -> False if the text ended within it.

    Where one of `ends` (markers that end a call) comes outside a string, the value is over: missing brackets are added.
    """
    open_brackets: list[str] = []
    while True:
        char = yield from source.peek()
        if char == "":
            return False
        if ends and open_brackets and (yield from comes_one_of(source, ends)):
            emit("".join(_CLOSING[bracket] for bracket in reversed(open_brackets)))
            return True
        if char == '"':
            if not (yield from copy_string(source, emit)):
                return False
        elif char in "{[":
            open_brackets.append(char)
            emit(source.take(1))
        elif char in "}]":
            if open_brackets:
                open_brackets.pop()
                emit(source.take(1))
        elif _SCALAR.fullmatch(char):
            scalar = yield from source.run(_SCALAR)
            emit(_WORDS.get(scalar, scalar))
        elif not open_brackets:
            return True
        elif char == ",":
            comma = source.take(1) + (yield from source.space())
            ended = (yield from source.peek()) in ("}", "]") or (yield from comes_one_of(source, ends))
            emit(comma[1:] if ended else comma)
        elif char in "<`":
            emit(source.take(1))
        else:
            yield from source.copy_run(_PLAIN, emit)
        if not open_brackets:
            return True


def comes_one_of(source: Source, texts: tuple[str, ...]) -> Steps[bool]:
    source.mark()
    found = yield from source.one_of(texts)
    source.rewind()
    return found is not None


def copy_string(source: Source, emit: Callable[[str], None]) -> Steps[bool]:
    """Copies a string from its opening quote to its closing one; raw control characters become escapes."""
    emit(source.take(1))
    while True:
        yield from source.copy_run(_IN_STRING, emit)
        char = yield from source.peek()
        if char == "":
            return False
        if char == '"':
            emit(source.take(1))
            return True
        if char == "\\":
            pair = yield from source.peek(2)
            emit(source.take(1) if len(pair) < 2 else _escaped(source.take(2)))
        else:
            emit(escape(source.take(1)))


def _escaped(pair: str) -> str:
    return pair if pair[1] in '"\\/bfnrtu' else escape(pair)


def read_value(source: Source, ends: tuple[str, ...] = ()) -> Steps[str | None]:
    """The text of the value that comes next; None if the text ended within it."""
    parts: list[str] = []
    whole = yield from copy_value(source, parts.append, ends)
    return "".join(parts) if whole else None


def read_string(source: Source) -> Steps[str | None]:
    """The string that comes next, decoded; None if there is none."""
    if (yield from source.peek()) != '"' or (text := (yield from read_value(source))) is None:
        return None
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
