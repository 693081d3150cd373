"""GLM 4.5, 4.6, 4.7: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>, with or without new
lines, arguments or none."""

from worker.parsers.parameters import ParameterParser
from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import NotACall

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45(ParameterParser):
    starts = ("<tool_call>",)
    ends = ("</tool_call>",)
    inner = (_KEY, _KEY_END, _VALUE, _VALUE_END)
    shape = Shape(
        "<tool_call>NAME\n",
        "</tool_call>",
        parameter=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
        between="\n",
    )

    def call(self, start: str) -> Steps[None]:
        head: list[str] = []
        mark = yield from self.source.until((_KEY, *self.ends), head.append)
        if mark is None:
            raise NotACall
        self.begin_object("".join(head).strip())
        while mark == _KEY:
            key: list[str] = []
            if (yield from self.source.until((_KEY_END,), key.append)) is None:
                return
            yield from self.source.space()
            if not (yield from self.source.literal(_VALUE)):
                if (yield from self.source.cut_off((_VALUE,))):
                    return
                mark = None
                break
            if (yield from self.argument("".join(key).strip(), (_VALUE_END,))) is None:
                return
            yield from self.source.space()
            mark = yield from self.source.one_of((_KEY, *self.ends))
        if mark is not None or not (yield from self.source.cut_off((_KEY, *self.ends))):
            self.end_object()
