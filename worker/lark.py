r"""Grammars in the lark dialect of the grammar engine, put together from texts, schemas and patterns.

    literal('<|call|>f {"a"', {"<|call|>": 7})    ->  <[7]> "f {\"a\""       # special tokens go by their id
    json_value({"type": "integer"})               ->  %json {"type": "integer"}

An expression can stand anywhere in a rule. Knows nothing of requests or formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.messages import GrammarSpec

TEXT = "TEXT: /(.|\\n)*/"  # any text; special tokens are none
_SLASH = re.compile(r"((?<!\\)(?:\\\\)*)/")


def literal(text: str, special: Mapping[str, int]) -> str:
    """Exactly `text`, in which the texts of special tokens stand for the tokens."""
    if not text:
        return ""
    tokens = sorted((token for token in special if token in text), key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    return " ".join(
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


def json_value(schema: Any) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def alternatives(expressions: Iterable[str]) -> str:
    return "(" + " | ".join(expressions) + ")"


def body(spec: GrammarSpec) -> str | None:
    """`spec` as an expression; None if it is a whole grammar of its own."""
    match spec.kind:
        case "json_schema":
            return json_value(json.loads(spec.source))
        case "json_object":
            return json_value({"type": "object"})
        case "choice":
            return alternatives(literal(choice, {}) for choice in json.loads(spec.source))
        case "regex":
            return "/" + _SLASH.sub(r"\1\\/", spec.source).replace("\n", "\\n") + "/"
    return None


def up_to(text: str, special: Mapping[str, int], name: str) -> tuple[str, str]:
    """(expression, rules): any text, up to and including the first `text`. `name` names the rules."""
    if text in special:
        return f"TEXT <[{special[text]}]>", TEXT
    return name, f"{name}[suffix={json.dumps(text, ensure_ascii=False)}]: /(.|\\n)*/"


def grammar(start: str, *rules: str) -> GrammarSpec:
    return GrammarSpec("lark", "\n".join([f"start: {start}", *dict.fromkeys(rule for rule in rules if rule)]) + "\n")
