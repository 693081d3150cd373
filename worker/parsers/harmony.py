"""gpt-oss: an output of several messages, each with a header that says where it goes.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

Thoughts, calls and the answer are told apart by the header alone, so this one parser does the work of two. The prompt
ends with <|start|>assistant; commentary to nobody is text for the user.
"""

import re
import secrets

from worker.parsers.base import Content, Reasoning, ToolCallArgs, ToolCallStart
from worker.parsers.partial_json import copy_value
from worker.parsers.shape import Shape
from worker.parsers.source import Machine, Steps
from worker.parsers.tool_parser import Tools

_CHANNEL, _MESSAGE, _START, _CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:-]+)")


class Harmony(Machine):
    """Reads whole outputs: reasoning, calls and content."""

    markers = frozenset((_CHANNEL, _MESSAGE, _START, _CONSTRAIN, *_ENDS))
    shape = Shape(f"{_CHANNEL}commentary to=functions.NAME {_CONSTRAIN}json{_MESSAGE}", "<|call|>", many=False)

    def __init__(self, tools: Tools, *, forced: bool = False) -> None:
        """`forced`: a call must come, so that the beginning of one is no text."""
        super().__init__()
        self.tools = tools
        self._forced = forced
        self.count = 0
        self._separator: dict[type[Content] | type[Reasoning], str] = {Content: "", Reasoning: ""}

    def run(self) -> Steps[None]:
        header: list[str] = []
        first = True
        while True:
            mark = yield from self.source.until((_MESSAGE, _START, *_ENDS), header.append)
            text = "".join(header)
            if mark == _MESSAGE:
                yield from self._message(text)
                header, first = [], False
            elif first and _CHANNEL not in text:
                self._say(Content, "" if self._forced else text)  # no header at all
                header, first = [], mark is None
            elif mark != _START:
                self._cut_header(text)
            if mark is None:
                return
            if mark == _START:
                header, first = [], False

    def _message(self, header: str) -> Steps[None]:
        recipient = _RECIPIENT.search(header)
        channel = header.partition(_CHANNEL)[2].split("<")[0].split()[:1]
        if recipient and recipient[1] in self.tools and (yield from self._call(recipient[1])):
            return
        kind = Reasoning if channel == ["analysis"] else Content
        self.answering, said = kind is Content, False

        def say(text: str) -> None:
            nonlocal said
            self._say(kind, ("" if said else self._separator[kind]) + text if text else "")
            said = said or bool(text)

        end = yield from self.source.until((_START, *_ENDS), say)
        self.answering = True
        if said:
            self._separator[kind] = "\n"
        if end == _START:
            self.source.unread(end)

    def _cut_header(self, text: str) -> None:
        """A header without a message. Of a call whose name is whole it is the beginning; to nobody, it says nothing."""
        recipient = _RECIPIENT.search(text)
        if recipient and recipient[1] in self.tools and recipient.end() < len(text):
            self._begin(recipient[1])
        elif recipient and not self._forced:
            self._say(Content, _bare(text))

    def _begin(self, name: str) -> int:
        """Announces a call. -> its index"""
        index, self.count = self.count, self.count + 1
        self.emit(ToolCallStart(index, f"call_{secrets.token_hex(12)}", name))
        return index

    def _call(self, name: str) -> Steps[bool]:
        """A call with the arguments that come next. -> False if they are no JSON object."""
        self.source.mark()
        yield from self.source.space()
        char = yield from self.source.peek()
        empty = (yield from self.source.one_of(_ENDS)) is not None
        if not empty and char not in ("{", ""):
            self.source.rewind()
            return False
        self.source.forget()
        index = self._begin(name)
        if empty or not char:
            if empty:
                self.emit(ToolCallArgs(index, "{}"))
            return True

        def args(fragment: str) -> None:
            if fragment:
                self.emit(ToolCallArgs(index, fragment))

        yield from copy_value(self.source, args, (*_ENDS, _START))
        yield from self.source.space()
        if (yield from self.source.one_of(_ENDS)) is None:
            yield from self.source.cut_off(_ENDS)
        return True

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            self.emit(kind(text))


def _bare(header: str) -> str:
    for marker in Harmony.markers:
        header = header.replace(marker, "")
    return header
