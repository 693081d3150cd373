"""Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>. FunctionGemma writes <escape> for the quote.
Keys stand without quotes, strings between markers, everything else as in JSON."""

import re

from worker.parsers.partial_json import copy_string, dumps, escape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall, ToolParser
from worker.parsers.values import typed

_NAME = re.compile(r"[\w.:-]*")
_KEY = re.compile(r"[^:{}\[\],<]*")
_SCALAR = re.compile(r"[^{}\[\],<]*")
_MAX_DEPTH = 50


class Gemma4(ToolParser):
    starts = ("<|tool_call>call:",)
    ends = ("<tool_call|>",)
    inner = ("<|tool_call>", '<|"|>')
    quote = '<|"|>'

    def call(self, start: str) -> Steps[None]:
        name = yield from self.source.run(_NAME)
        if (yield from self.source.peek()) != "{":
            raise NotACall
        self.begin(name)
        yield from self._value(0)
        yield from self.end()

    def _value(self, depth: int) -> Steps[bool]:
        """Writes the value that comes next as JSON. -> False if the text ended within it."""
        yield from self.source.space()
        char = yield from self.source.peek()
        if char in ("{", "[") and depth < _MAX_DEPTH:
            return (yield from self._items(depth))
        if char == '"':
            return (yield from copy_string(self.source, self.args))
        if (yield from self.source.literal(self.quote)):
            self.args('"')
            if (
                yield from self.source.until((self.quote,), lambda text: self.args(escape(text)), drop_cut=True)
            ) is None:
                return False
            self.args('"')
            return True
        if (yield from self.source.cut_off((self.quote,))):
            return False
        text = yield from self.source.run(_SCALAR)
        if (yield from self.source.peek()) == "":
            return False
        self.args(typed(text.strip(), frozenset()))
        return True

    def _items(self, depth: int) -> Steps[bool]:
        opening = self.source.take(1)
        closing = "}" if opening == "{" else "]"
        self.args(opening)
        first = True
        while True:
            yield from self.source.space()
            if (yield from self.source.literal(closing)):
                self.args(closing)
                return True
            if not first and not (yield from self.source.literal(",")):
                return (yield from self._broken(closing))
            if not first:
                self.args(", ")
            first = False
            if opening == "{" and not (yield from self._key()):
                return (yield from self._broken(closing))
            if not (yield from self._value(depth + 1)):
                return False

    def _key(self) -> Steps[bool]:
        yield from self.source.space()
        key: list[str] = []
        if (yield from self.source.literal(self.quote)):
            yield from self.source.until((self.quote,), key.append)
            yield from self.source.space()
        else:
            key.append((yield from self.source.run(_KEY)).strip().strip('"'))
        if not (yield from self.source.literal(":")):
            return False
        self.args(dumps("".join(key)) + ": ")
        return True

    def _broken(self, closing: str) -> Steps[bool]:
        """What follows is no item: the value is closed, unless the text is over."""
        if (yield from self.source.cut_off((self.quote,))):
            return False
        self.args(closing)
        return True


class FunctionGemma(Gemma4):
    starts = ("<start_function_call>call:",)
    ends = ("<end_function_call>",)
    inner = ("<start_function_call>", "<escape>")
    quote = "<escape>"
