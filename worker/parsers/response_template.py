"""Output formats that a checkpoint describes itself, by `response_template` in tokenizer_config.json.

The description is read by transformers' own parser (`transformers.utils.chat_parsing`, which imports no torch); this
turns its regions into deltas: `thinking` (or `reasoning`) and `content` stream, `tool_calls` come out when a call is
whole. What the description cannot parse, and calls of unknown tools, come out as content.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from worker.parsers.base import Content, Delta, Reasoning, ToolCallArgs, ToolCallStart, Trail
from worker.parsers.partial_json import dumps
from worker.parsers.tool_parser import Tools

_REASONING = ("thinking", "reasoning", "reasoning_content")
_CALLS = "tool_calls"


def supported(template: Any) -> bool:
    """Whether `template` can be read here. False too where the installed transformers has no such parser."""
    try:
        _parser(template, "", {})
    except Exception:  # an invalid template raises what its regexes and lookups raise
        return False
    return True


def _parser(template: Any, prompt: str, tools: Tools) -> Any:
    from transformers.utils.chat_parsing import ResponseParser

    functions: list[Any] = [{"function": {"name": name, "parameters": schema or {}}} for name, schema in tools.items()]
    return ResponseParser(template, prefix=prompt, tools=functions)


class ResponseTemplateParser:
    """Reads whole outputs: reasoning, calls and content."""

    def __init__(self, template: Any, tools: Tools, prompt: str = "") -> None:
        """`prompt`: the rendered prompt; what it already wrote of the answer counts."""
        self._make: Callable[[], Any] = lambda: _parser(template, prompt, tools)
        self._parser = self._make()
        self._fed: list[str] = []
        self._tools = tools
        self._count = 0
        self._region: list[str] = []  # the text of the calls being read
        self._said: dict[str, Trail] = {}  # by field that has said something
        self.markers = frozenset(_literals(template))
        self._failed = False  # a region could not be parsed: everything from there on is text

    def feed(self, text: str) -> list[Delta]:
        if self._failed:
            return _text(text)
        try:
            deltas = self._deltas(self._parser.feed(text))
        except Exception:  # a region that its own description cannot parse raises anything
            return self._text_from_failure(text)
        self._fed.append(text)
        return deltas

    def close(self) -> list[Delta]:
        if self._failed:
            return []
        try:
            return self._deltas(self._parser.finalize()[1])
        except Exception:
            return _text("".join(self._region))

    def _text_from_failure(self, text: str) -> list[Delta]:
        """Reads `text` again, by characters: what came before the failure is kept."""
        self._failed = True
        parser = self._make()
        parser.feed("".join(self._fed))
        deltas: list[Delta] = []
        for index, char in enumerate(text):
            try:
                deltas += self._deltas(parser.feed(char))
            except Exception:
                return [*deltas, *_text("".join(self._region) + text[index + 1 :])]
        return deltas

    def _deltas(self, events: list[dict[str, Any]]) -> list[Delta]:
        return [delta for event in events for delta in self._event(event)]

    def _event(self, event: dict[str, Any]) -> list[Delta]:
        field = event["field"]
        if event["type"] == "region_chunk":
            return self._chunk(field, event["text"])
        if event["type"] == "region_close" and field == _CALLS:
            value, text = event["value"], "".join(self._region)
            self._region.clear()
            calls = [_function(call) for call in (value if isinstance(value, list) else [value])]
            if any(name not in self._tools for name, _ in calls):
                return _text(text)
            return [delta for name, arguments in calls for delta in self._call(name, arguments)]
        self._said.pop(field, None)
        return []

    def _chunk(self, field: str, text: str) -> list[Delta]:
        if field == _CALLS:
            self._region.append(text)
            return []
        if field not in self._said and not (text := text.lstrip()):
            return []
        said = self._said.setdefault(field, Trail()).add(text)
        kind = Reasoning if field in _REASONING else Content
        return [kind(said)] if said else []

    def _call(self, name: str, arguments: Any) -> list[Delta]:
        index, self._count = self._count, self._count + 1
        text = arguments if isinstance(arguments, str) else dumps(arguments or {})
        return [ToolCallStart(index, f"call_{secrets.token_hex(12)}", name), ToolCallArgs(index, text or "{}")]


def _text(text: str) -> list[Delta]:
    return [Content(text)] if text else []


def _function(call: Any) -> tuple[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    return (name if isinstance(name, str) else "", function.get("arguments") if isinstance(function, dict) else None)


def _literals(template: Any) -> list[str]:
    """All texts in the description: any special token among them must be seen."""
    if isinstance(template, str):
        return [template]
    children = template.values() if isinstance(template, dict) else template if isinstance(template, list) else ()
    return [text for child in children for text in _literals(child)]
