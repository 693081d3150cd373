"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}] up to tokenizer v10, [TOOL_CALLS]NAME[ARGS]{...} from v11
on, repeated. Ids are nine letters and digits: the templates refuse others."""

import re
import secrets
import string

from worker.parsers.shape import Shape
from worker.parsers.source import Steps
from worker.parsers.tool_parser import ToolParser

_NAME = re.compile(r"[\w.:-]*")
_ALPHABET = string.ascii_letters + string.digits


class Mistral(ToolParser):
    starts = ("[TOOL_CALLS]",)
    ends = ("[TOOL_CALLS]",)
    inner = ("[ARGS]", "[CALL_ID]")
    shape = Shape('{"name": "NAME", "arguments": ', "}", first="[TOOL_CALLS][", between=", ", last="]")

    def new_id(self, name: str) -> str:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def call(self, start: str) -> Steps[None]:
        yield from self.source.space()
        if (yield from self.source.peek()) in ("[", "{"):
            yield from self.object_calls()
            return
        name = yield from self.source.run(_NAME)
        call_id = None
        if (yield from self.source.literal("[CALL_ID]")):
            call_id = yield from self.source.run(_NAME)
        yield from self.source.literal("[ARGS]")
        yield from self.arguments_of(name, call_id)


class MistralV11(Mistral):
    """Reads the same; constrained answers are written the newer way."""

    shape = Shape("[TOOL_CALLS]NAME[ARGS]")
