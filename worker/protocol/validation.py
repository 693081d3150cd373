"""Checks that hold for any JSON a client sends, and how a failed check is told.

Every function is bounded: in time by the size of its input, in output by a few hundred characters.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pydantic import ValidationError

from worker.errors import BadRequest, clip

# Deeper JSON than this is refused before anything recursive sees it (orjson stops at 254, Python at about 1000).
MAX_DEPTH = 200
MAX_QUOTE_CHARS = 80
MAX_ERRORS = 10
# Token ids do not count. 10,000 messages with parts are a fifth of this; millions would take seconds to look at.
MAX_VALUES = 500_000
# A request with more values or characters takes milliseconds to check: too long for an event loop.
LARGE_VALUES, LARGE_CHARS = 2_000, 1_000_000
# What orjson can write. Printing a much larger integer could take quadratic time.
MIN_INT, MAX_INT = -(2**63), 2**64 - 1

_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "an array",
}


def fail(param: str, text: str, code: str = "invalid_value") -> NoReturn:
    """Raise the 400 whose message is "<param> <text>"."""
    raise BadRequest(f"{param} {text}", param=param, code=code)


def quote(value: Any) -> str:
    """`value` as a client may read it back: JSON-like, at most 80 characters, never failing."""
    if isinstance(value, str):
        return '"' + clip(value, MAX_QUOTE_CHARS) + '"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 256 else "a very large integer"
    if isinstance(value, float):
        return repr(value)
    return kind(value)


def kind(value: Any) -> str:
    """The JSON type of `value` with its article, for "expected ..., got ..."."""
    return _KINDS.get(type(value), "a value that is not JSON")


def check_json(body: dict[Any, Any], *, max_depth: int = MAX_DEPTH) -> None:
    """Refuse what no field can mean: nesting beyond `max_depth`, too many values, text that is not Unicode, NaN,
    infinities, integers beyond 64 bits, keys that are not strings, values that JSON does not have.

    Iterative, one visit a value; arrays of token ids cost next to nothing.
    """
    stack: list[tuple[Any, Any, int]] = [(body, (), 1)]
    num_values = 0
    while stack:
        container, path, depth = stack.pop()
        if depth > max_depth:
            fail(_dotted(path), f"is nested deeper than {max_depth} levels")
        if _are_token_ids(container):
            continue
        num_values += len(container)
        if num_values > MAX_VALUES:
            fail(_dotted(path) or "body", f"brings the request to more than {MAX_VALUES} values")
        if isinstance(container, dict):
            for key, value in container.items():
                if not isinstance(key, str):
                    fail(_dotted(path) or "body", "has a key that is not a string", "invalid_type")
                if not key.isascii():
                    _check_text(key, path, "a key of ")
                if not _is_plain_text(value):
                    _check_value(value, (path, key), depth, stack)
        else:
            for index, value in enumerate(container):
                if not _is_plain_text(value):
                    _check_value(value, (path, index), depth, stack)


def is_large(body: Any) -> bool:
    """Whether checking a body takes long enough to be noticed by other streams. Itself stops looking early."""
    stack, num_values, num_chars = [body], 0, 0
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, list) and value and type(value[0]) is type(value[-1]) is int:
            num_chars += 20 * len(value)  # token ids are cheap
        elif isinstance(value, dict | list):
            num_values += len(value)
            if num_values <= LARGE_VALUES:
                stack.extend(value.values() if isinstance(value, dict) else value)
        if num_values > LARGE_VALUES or num_chars > LARGE_CHARS:
            return True
    return False


def _are_token_ids(container: Any) -> bool:
    return (
        isinstance(container, list)
        and set(map(type, container)) == {int}
        and min(container) >= MIN_INT
        and max(container) <= MAX_INT
    )


def _is_plain_text(value: Any) -> bool:
    return type(value) is str and value.isascii()


def _check_value(value: Any, path: Any, depth: int, stack: list[Any]) -> None:
    if isinstance(value, dict | list):
        stack.append((value, path, depth + 1))
    elif isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            fail(_dotted(path), "must be a finite number")
    elif isinstance(value, int):
        if not MIN_INT <= value <= MAX_INT:
            fail(_dotted(path), "is an integer beyond 64 bits")
    elif value is not None:
        fail(_dotted(path), "is not a JSON value", "invalid_type")


def _check_text(text: str, path: Any, what: str = "") -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code_point = ord(text[error.start])
        param = _dotted(path) or "body"
        raise BadRequest(
            f"{what}{param} holds half of a surrogate pair (U+{code_point:04X}), which is not Unicode text", param=param
        ) from None


def _dotted(path: Any) -> str:
    """`(((), "messages"), 0)`, each step linked to the one before, -> "messages[0]"."""
    keys: list[str | int] = []
    while path:
        path, key = path
        keys.append(key)
    return join_path(*keys[::-1])


def join_path(*keys: str | int) -> str:
    """Keys and indices as the dotted path of OpenAI's `param`, at most 200 characters."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{clip(key, 64)}" if text else clip(key, 64)
        if len(text) > 200:
            return clip(text, 200)
    return text


_PYDANTIC_TEXTS = {
    "missing": ("missing_required_parameter", "is required"),
    "model_type": ("invalid_type", "must be an object"),
}


def explain(error: ValidationError) -> BadRequest:
    """The first error's field as `param`, at most ten errors in the message."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    lines, first_param, first_code = [], "", ""
    for detail in details[:MAX_ERRORS]:
        param = join_path(*detail["loc"]) or "body"
        code, text = _PYDANTIC_TEXTS.get(detail["type"], (detail["type"], detail["msg"]))
        first_param, first_code = first_param or param, first_code or code
        lines.append(f"{param} {text}")
    if len(details) > MAX_ERRORS:
        lines.append(f"and {len(details) - MAX_ERRORS} more")
    return BadRequest("; ".join(lines), param=first_param, code=first_code)
