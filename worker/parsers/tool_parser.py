"""What all tool-call formats share; a format says only what its calls look like.

A format declares the texts that begin a call, and reads one call in `call`. While it reads, everything is held; where
it raises NotACall, the text comes out as content and reading goes on behind the beginning. From `begin` on the call is
announced and its arguments stream.

White space around calls belongs to the format, not to the answer: it is dropped next to a call and kept elsewhere.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from templates import Calls, calls_as_json
from worker.parsers.base import Content, ToolCallArgs, ToolCallStart, Trail
from worker.parsers.partial_json import comes_one_of, copy_value, loads, read_string, read_value
from worker.parsers.shape import Shape
from worker.parsers.source import Machine, Steps

# By name, the JSON schema of the arguments (None: not given, any object).
Tools = Mapping[str, Mapping[str, Any] | None]

_JUNK = "}] \t\r\n"  # one bracket too many before the end of a call


class NotACall(Exception):
    """What was read is no call of a known tool."""


class ToolParser(Machine):
    """Base of the formats that mark calls by text."""

    starts: ClassVar[tuple[str, ...]] = ()  # each begins a call
    ends: ClassVar[tuple[str, ...]] = ()  # each may end one
    opens: ClassVar[tuple[str, ...]] = ()  # before all calls
    closes: ClassVar[tuple[str, ...]] = ()  # after all calls
    inner: ClassVar[tuple[str, ...]] = ()  # further markers within a call
    shape: ClassVar[Shape | None] = None  # None: cannot be constrained in its own form
    trigger: ClassVar[str | None] = None  # what the shape begins with, if that is never written but for a call

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self.tools = tools
        self.markers = frozenset((*self.starts, *self.ends, *self.opens, *self.closes, *self.inner))
        self.count = 0  # of calls begun
        self._space = Trail()  # at the end of what was said, not yet emitted
        self._after_call = False  # nothing but space since
        self._owed = ""  # the opening of a section whose first call is yet to be seen

    @abstractmethod
    def call(self, start: str) -> Steps[None]:
        """Reads one call behind `start`, its end included. Raises NotACall before `begin`, never after."""

    def bare(self) -> Steps[None]:
        """Reads calls that stand at the very beginning without a start."""
        raise NotACall
        yield

    @classmethod
    def write(cls, calls: Calls) -> str:
        """Calls as the model writes them; as JSON where the format has no shape."""
        return calls_as_json(calls) if cls.shape is None else cls.shape.write(calls)

    def new_id(self, name: str) -> str:
        """Of the next call, which is one of `name`."""
        return f"call_{secrets.token_hex(12)}"

    def run(self) -> Steps[None]:
        yield from self.attempt(self.bare())
        watched = self.starts + self.opens + self.closes
        while (marker := (yield from self.source.until(watched, self.say))) is not None:
            if marker in self.opens:
                yield from self._open(marker)
            elif marker in self.closes:
                if not self._after_call:
                    self.say(marker)
            elif (yield from self.attempt(self.call(marker))):
                self._owed = ""
            else:
                self.say(self._owed + marker)
                self._owed = ""
        if not self._after_call and (space := self._space.take()):
            self.emit(Content(space))

    def attempt(self, steps: Steps[None]) -> Steps[bool]:
        """Runs `steps`; where they raise NotACall, nothing was read. -> whether they did not. An output of very many
        beginnings that lead to nothing is read as text in the end."""
        if self.source.exhausted:
            steps.close()
            return False
        self.source.mark()
        before = self.count
        try:
            yield from steps
        except NotACall:
            if self.count == before:
                self.source.rewind()
                return False
        self.source.forget()
        return True

    def say(self, text: str) -> None:
        """Text that is content. The beginning of a closing marker at the end of the output is none."""
        if self.source.ended and self._after_call and any(close.startswith(text) for close in self.closes):
            return
        if said := self._space.add(text):
            self.emit(Content(said))
            self._after_call = False

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Announces a call; there is no way back. Raises NotACall for an unknown tool."""
        if name not in self.tools:
            raise NotACall
        self.source.commit()
        self._space.take()
        self._after_call = True
        self.emit(ToolCallStart(self.count, call_id or self.new_id(name), name))
        self.count += 1

    def args(self, fragment: str) -> None:
        """A fragment of the arguments of the call begun last."""
        if fragment:
            self.emit(ToolCallArgs(self.count - 1, fragment))

    def arguments_of(self, name: str, call_id: str | None = None) -> Steps[None]:
        """A call of `name` whose arguments, a JSON object, come next, or its end: there are none. Raises NotACall where
        neither comes."""
        yield from self.source.space()
        if (yield from comes_one_of(self.source, self.ends)):
            self.begin(name, call_id)
            self.args("{}")
        elif (yield from self.source.peek()) == "{":
            self.begin(name, call_id)
            yield from copy_value(self.source, self.args, self.ends)
        else:
            arguments = _arguments((yield from read_value(self.source)))
            self.begin(name, call_id)
            self.args(arguments)

    def object_call(self, *, bare: bool = False, within: bool = False) -> Steps[None]:
        """A call as one JSON object of name and arguments. `bare`: nothing else marks it, arguments must be there.
        `within`: it is the value of "function" in another object."""
        if not (yield from self.source.literal("{")):
            raise NotACall
        before, name, held = self.count, None, None
        while True:
            yield from self.source.space()
            if (yield from self.source.literal("}")):
                break
            if (yield from self.source.literal(",")):
                continue
            key = yield from read_string(self.source)
            yield from self.source.space()
            if key is None or not (yield from self.source.literal(":")):
                if self.count > before:
                    return  # a bracket is missing: the call itself is whole
                raise NotACall
            yield from self.source.space()
            if self.count > before:
                yield from read_value(self.source)
            elif key == "function" and not within and (yield from self.source.peek()) == "{":
                yield from self.object_call(bare=bare, within=True)
            elif key in ("name", "tool_name", "function"):
                name = yield from read_string(self.source)
                if name not in self.tools:
                    raise NotACall
            elif key not in ("arguments", "parameters"):
                if (yield from read_value(self.source)) is None:
                    raise NotACall
            elif name is not None:
                yield from self.arguments_of(name)
            elif (held := (yield from read_value(self.source))) is None:
                raise NotACall
        if self.count == before:
            if name is None or (bare and held is None):
                raise NotACall
            arguments = "{}" if held is None else _arguments(held)
            self.begin(name)
            self.args(arguments)

    def object_calls(self, *, bare: bool = False) -> Steps[None]:
        """One or more such objects, in an array or with `;` or `,` between them. The first must be a call; what is none
        among the others comes out as content."""
        in_list = yield from self.source.literal("[")
        yield from self.source.space()
        yield from self.object_call(bare=bare)
        while True:
            self.source.mark()
            space = yield from self.source.space()
            if in_list and (yield from self.source.literal("]")):
                break
            separator = yield from self.source.one_of((",", ";"))
            space += yield from self.source.space()
            if (yield from self.source.peek()) != "{":
                self.source.rewind()
                return
            self.source.forget()
            if not (yield from self.attempt(self.object_call(bare=bare))):
                self.source.mark()
                yield from read_value(self.source, self.ends)
                self.say((separator or "") + space + self.source.since_mark())
                self.source.forget()
        self.source.forget()

    def end(self) -> Steps[None]:
        """Reads the end of a call, if it is there."""
        self.source.mark()
        while (yield from self.source.peek()) in tuple(_JUNK):
            self.source.take(1)
        if (yield from self.source.one_of(self.ends)) is None and not (yield from self.source.cut_off(self.ends)):
            self.source.rewind()
        else:
            self.source.forget()

    def _open(self, marker: str) -> Steps[None]:
        """The opening of a section is dropped if a call follows."""
        space = yield from self.source.space()
        self.source.mark()
        follows = (yield from self.source.one_of(self.starts)) is not None
        self.source.rewind()
        if follows:
            self._owed = marker + space
        else:
            self.say(marker + space)


def _arguments(text: str | None) -> str:
    """Arguments that are no object as they stand: none at all, or an object within a string."""
    try:
        value = loads(text or "")
        if isinstance(value, str):
            text = value.strip()
            value = loads(text) if text else None
    except ValueError:
        raise NotACall from None
    if not value and not isinstance(value, bool | int | float):
        return "{}"
    if not isinstance(value, dict):
        raise NotACall
    return text or "{}"
