"""Calls as Python writes them: [f(a=1), g(b="x")] as the whole answer (Llama 3.2 and 4), or in markers (LFM2, Olmo
3)."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from templates import Calls
from worker.parsers.partial_json import dumps
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall, ToolParser

_NAME = re.compile(r"[\w.:-]*")
_PLAIN = re.compile(r"[^()\[\]{}\"'\\]*")
_JSON_WORDS = {"true": True, "false": False, "null": None}
_MAX_CHARS = 100_000  # of one call's arguments, for the parser of Python
_MAX_DEPTH = 50


class Pythonic(ToolParser):
    starts = ("<|python_start|>",)
    ends = ("<|python_end|>",)

    @classmethod
    def write(cls, calls: Calls) -> str:
        if not all(isinstance(given, dict) and all(map(str.isidentifier, given)) for _, given in calls):
            return super().write(calls)
        listed = ", ".join(
            f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in given.items())})" for name, given in calls
        )
        return f"[{listed}]" if cls is Pythonic else f"{cls.starts[0]}[{listed}]{cls.ends[0]}"

    def bare(self) -> Steps[None]:
        yield from self.source.space()
        if (yield from self.source.peek()) != "[":
            raise NotACall
        yield from self._calls()

    def call(self, start: str) -> Steps[None]:
        yield from self.source.space()
        yield from self._calls()
        yield from self.end()

    def _calls(self) -> Steps[None]:
        in_list = yield from self.source.literal("[")
        yield from self._one()
        while True:
            self.source.mark()
            separator = yield from self.source.space()
            if in_list and (yield from self.source.literal("]")):
                self.source.forget()
                return
            comma = yield from self.source.literal(",")
            yield from self.source.space()
            if not (comma or (separator and not in_list)) or not (yield from self.attempt(self._one())):
                self.source.rewind()
                return
            self.source.forget()

    def _one(self) -> Steps[None]:
        yield from self.source.space()
        name = yield from self.source.run(_NAME)
        if name not in self.tools or (yield from self.source.peek()) != "(":
            raise NotACall
        text = yield from self._brackets()
        arguments = dumps(_keywords(text, self.tools[name]))
        self.begin(name)
        self.args(arguments)

    def _brackets(self) -> Steps[str]:
        """The text in the round brackets that come next."""
        parts: list[str] = []
        depth = 0
        while True:
            parts.append((yield from self.source.run(_PLAIN)))
            char = yield from self.source.peek()
            if char == "" or len(parts) > _MAX_CHARS:
                raise NotACall
            if char in "\"'":
                yield from self._string(parts, char)
                continue
            parts.append(self.source.take(1))
            depth += (char in "([{") - (char in ")]}")
            if depth == 0:
                return "".join(parts)

    def _string(self, parts: list[str], quote: str) -> Steps[None]:
        parts.append(self.source.take(1))
        while (stop := (yield from self.source.until(("\\", quote), parts.append))) == "\\":
            parts.append(stop + (yield from self.source.peek()))
            self.source.take(len(parts[-1]) - 1)
        if stop is None:
            raise NotACall
        parts.append(stop)


class Lfm2(Pythonic):
    starts = ("<|tool_call_start|>",)
    ends = ("<|tool_call_end|>",)


class Olmo3(Pythonic):
    starts = ("<function_calls>",)
    ends = ("</function_calls>",)


def _literal(value: Any) -> str:
    """A value of JSON as Python writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return dumps(value) if isinstance(value, str) else repr(value)


def _keywords(text: str, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `f(...)`; positional ones are named in the order of the schema's properties."""
    if len(text) > _MAX_CHARS:
        raise NotACall
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call):
            raise NotACall
        names = list((schema or {}).get("properties") or {})
        arguments = {names[index]: _value(node, 0) for index, node in enumerate(call.args)}
        if any(keyword.arg is None for keyword in call.keywords):
            raise NotACall
        return arguments | {str(keyword.arg): _value(keyword.value, 0) for keyword in call.keywords}
    except (SyntaxError, ValueError, IndexError, MemoryError, RecursionError):
        raise NotACall from None


def _value(node: ast.expr, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.Name(name) if name in _JSON_WORDS:
            return _JSON_WORDS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return [_value(item, depth + 1) for item in items]
        case ast.Dict(keys, values):
            return {str(_value(k, depth)): _value(v, depth + 1) for k, v in zip(keys, values, strict=True) if k}
    raise ValueError("not a literal")
