"""<invoke name="NAME"> with <parameter name="KEY">value</parameter>, in a section: MiniMax M2; Muse Glimmer and
MiniCPM5 with other tags; DeepSeek V3.2 and V4, whose tags begin with ｜DSML｜ and say of each value whether it is a
string or JSON."""

import re

from worker.parsers.parameters import ParameterParser
from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall

# Behind `name="`: the name, and further attributes.
_ATTRIBUTES = re.compile(r'([^"]+)"(?:\s+string="(true|false)")?\s*')
_KINDS = {"true": "string", "false": "json", None: None}


class Invoke(ParameterParser):
    """Base of all."""

    parameter: str
    parameter_end: str

    def call(self, start: str) -> Steps[None]:
        name, _ = yield from self._attributes()
        if name is None:
            raise NotACall
        self.begin_object(name)
        while True:
            yield from self.source.space()
            mark = yield from self.source.one_of((self.parameter, *self.ends))
            if mark != self.parameter:
                break
            key, kind = yield from self._attributes()
            if key is None or (yield from self.argument(key, (self.parameter_end,), kind=kind)) is None:
                return
        if mark is not None or not (yield from self.source.cut_off((self.parameter, *self.ends))):
            self.end_object()

    def _attributes(self) -> Steps[tuple[str | None, str | None]]:
        """The rest of a tag -> (name, kind of its value)."""
        text: list[str] = []
        if (yield from self.source.until((">", "\n"), text.append)) != ">":
            return None, None
        match = _ATTRIBUTES.fullmatch("".join(text))
        return (match[1], _KINDS[match[2]]) if match else (None, None)


class MiniMaxM2(Invoke):
    opens = ("<minimax:tool_call>",)
    closes = ("</minimax:tool_call>",)
    starts = ('<invoke name="',)
    ends = ("</invoke>",)
    parameter = '<parameter name="'
    parameter_end = "</parameter>"
    shape = Shape(
        '<invoke name="NAME">\n',
        "</invoke>\n",
        parameter=('<parameter name="KEY">', "</parameter>\n"),
        first="<minimax:tool_call>\n",
        last="</minimax:tool_call>",
    )


class DeepSeekDsml(Invoke):
    opens = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    closes = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    starts = ('<｜DSML｜invoke name="',)
    ends = ("</｜DSML｜invoke>",)
    inner = ("｜DSML｜",)
    parameter = '<｜DSML｜parameter name="'
    parameter_end = "</｜DSML｜parameter>"


class MuseGlimmer(Invoke):
    opens = ("<atem:function_calls>",)
    closes = ("</atem:function_calls>",)
    starts = ('<atem:invoke name="',)
    ends = ("</atem:invoke>",)
    parameter = '<atem:parameter name="'
    parameter_end = "</atem:parameter>"


class MiniCPM5(Invoke):
    starts = ('<function name="',)
    ends = ("</function>",)
    parameter = '<param name="'
    parameter_end = "</param>"
