"""How the calls of a tool-call format look, as data: what constrains answers, and writes the calls of a history."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from templates import Calls


@dataclass(frozen=True, slots=True)
class Shape:
    """How the model writes a call: NAME stands for the tool's name."""

    before: str  # the arguments: a JSON object, or parameters
    after: str = ""
    parameter: tuple[str, str] | None = None  # around each value, if arguments are parameters: KEY stands for its name
    first: str = ""  # before all calls
    between: str = ""
    last: str = ""  # after all calls
    many: bool = True  # several calls can stand in one answer

    def write(self, calls: Calls) -> str:
        """These calls as text."""
        texts = (self.before.replace("NAME", name) + self._arguments(given) + self.after for name, given in calls)
        return self.first + (self.between or ("" if self.many else "\n")).join(texts) + self.last

    def _arguments(self, given: Any) -> str:
        if isinstance(given, str):  # no object: as it stands
            return given
        if self.parameter is None:
            return _json(given)
        before, after = self.parameter
        return "".join(
            before.replace("KEY", key) + (value if isinstance(value, str) else _json(value)) + after
            for key, value in given.items()
        )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # what a client sent may hold NaN
