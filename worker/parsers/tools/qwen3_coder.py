"""Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5: <function=NAME> with <parameter=KEY> value </parameter>, in <tool_call>
(which the models sometimes leave out). Seed-OSS: the same in <seed:tool_call>."""

from worker.parsers.parameters import ParameterParser
from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall

_PARAMETER, _END = "<parameter=", "</parameter>"


class Qwen3Coder(ParameterParser):
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)
    starts = ("<function=",)
    ends = ("</function>",)
    in_lines = True
    shape = Shape(
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        parameter=("<parameter=KEY>\n", "\n</parameter>\n"),
        between="\n",
    )

    def call(self, start: str) -> Steps[None]:
        head: list[str] = []
        if (yield from self.source.until((">", "\n"), head.append)) != ">":
            raise NotACall
        self.begin_object("".join(head).strip())
        while True:
            yield from self.source.space()
            expected = (_PARAMETER, _END, *self.ends, *self.closes)
            mark = yield from self.source.one_of(expected)
            if mark == _PARAMETER:
                yield from self._parameter()
            elif mark != _END:
                break
        if mark in self.closes:
            self.source.unread(mark)  # the end of the function was left out
        if mark is not None or not (yield from self.source.cut_off(expected)):
            self.end_object()

    def _parameter(self) -> Steps[None]:
        key: list[str] = []
        if (yield from self.source.until((">",), key.append)) is None:
            return
        end = yield from self.argument("".join(key).strip(), (_END, f"\n{_PARAMETER}", *self.ends))
        if end is not None and end != _END:
            self.source.unread(end.lstrip("\n"))  # the end of the parameter was left out


class SeedOss(Qwen3Coder):
    opens = ("<seed:tool_call>",)
    closes = ("</seed:tool_call>",)
    in_lines = False
    shape = Shape(
        "<seed:tool_call>\n<function=NAME>\n",
        "</function>\n</seed:tool_call>",
        parameter=("<parameter=KEY>", "</parameter>\n"),
        between="\n",
    )
