"""Tools -> grammars of calls in the model's own form, so that arguments always parse and match their schemas.

    must_call(form, tools, special)      the output is one or more calls
    may_call(form, tools, special)       text, in which every call is right

A form is a tool-call format that says how it is written (`Shape`). Knows no requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker import lark
from worker.closed_schema import can_be_closed, closed
from worker.parsers.shape import Shape
from worker.parsers.tool_parser import Tools
from worker.plain_values import ANNOTATIONS, as_text

MAX_MORE_CALLS = 15  # behind the first one
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Form:
    """What is needed of a format: the parser's name in the registry, how it writes, what announces a call."""

    name: str
    shape: Shape
    marks: tuple[str, ...] = ()  # never written but to begin a call


@dataclass(frozen=True, slots=True)
class Expression:
    text: str
    rules: tuple[str, ...] = ()


def as_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments, which are always an object, though it may not say so. Raises ValueError if they cannot
    be one."""
    types = schema.get("type", "object")
    if types != "object" and (isinstance(types, str) or (isinstance(types, list) and "object" not in types)):
        raise ValueError
    return {**schema, "type": "object"} if isinstance(types, str | list) else schema


def can_write(form: Form, tools: Tools) -> bool:
    """Whether every possible call of `tools` can be written in this form."""
    return form.shape.parameter is None or all(_plain_parameters(schema) for schema in tools.values())


def must_call(form: Form, tools: Tools, special: Mapping[str, int], *, many: bool) -> Expression:
    """At least one call, and nothing else."""
    shape = form.shape
    one = _calls(shape, tools, special, "")
    more = lark.literal(shape.between, special)
    repeat = f"({more} call){{0,{MAX_MORE_CALLS}}}" if many and shape.many else ""
    start = f"{lark.literal(shape.first, special)} call {repeat} {lark.literal(shape.last, special)}"
    return Expression(f"({start})", (f"call: {one.text}", *one.rules))


def may_call(form: Form, tools: Tools, special: Mapping[str, int], *, many: bool) -> Expression:
    """Any text; where it announces a call, a call follows. What else would be read as a call cannot be written."""
    shape = form.shape
    opening = shape.first + shape.before
    mark = max((mark for mark in form.marks if opening.startswith(mark)), key=len, default="")
    others = [_pattern(other) for other in form.marks if other != mark and other not in special]
    free = "/(.|\\n)*/" + (f" & ~/(.|\\n)*({'|'.join(others)})(.|\\n)*/" if others else "")
    if not mark:  # the answer is calls or text, and its first character says which
        calls = must_call(form, tools, special, many=many)
        return Expression(f"(OTHER | {calls.text})?", (*calls.rules, f"OTHER: /[^\\[{{\\s](.|\\n)*/ & ({free})"))
    rules = [f"FREE: {free}"]
    if mark in special:
        announced = f"FREE <[{special[mark]}]>"
    else:
        announced = "announced"
        rules.append(f"announced[lazy]: FREE {lark.literal(mark, {})}")
    first = _calls(shape, tools, special, mark)
    calls_text = f"{announced} {first.text}"
    if shape.last:
        between = lark.literal(shape.between, special)
        repeat = f" ({between} call){{0,{MAX_MORE_CALLS}}}" if shape.many and many else ""
        calls_text += f"{repeat} {lark.literal(shape.last, special)}"
        further = _calls(shape, tools, special, "")
        rules += [f"call: {further.text}", *further.rules]
    blocks = "block*" if shape.many and many else "block?"
    return Expression(f"{blocks} FREE", (*rules, f"block: {calls_text}", *first.rules))


def _pattern(text: str) -> str:
    """The text as part of a pattern of the grammar."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")


def _calls(shape: Shape, tools: Tools, special: Mapping[str, int], mark: str) -> Expression:
    """One call of any of `tools`. `mark`: what has been written of the first one already."""
    options: list[str] = []
    rules: list[str] = []
    for number, (name, schema) in enumerate(tools.items()):
        before = (shape.first if mark else "") + shape.before.replace("NAME", name)
        arguments = _arguments(shape, _NO_PARAMETERS if schema is None else schema, special, number)
        after = lark.literal(shape.after, special)
        # A rule each: what is measured is the size of a rule, and hundreds of tools are no bomb.
        options.append(f"{'first' if mark else 'tool'}_{number}")
        rules.append(f"{options[-1]}: {lark.literal(before.removeprefix(mark), special)} {arguments.text} {after}")
        rules += arguments.rules
    return Expression(lark.alternatives(options), tuple(rules))


def _arguments(shape: Shape, schema: Mapping[str, Any], special: Mapping[str, int], number: int) -> Expression:
    if shape.parameter is None:
        # No function expects arguments that it does not name, and a small model makes them up without end.
        return Expression(lark.json_value(closed(schema) if can_be_closed(schema) else schema))
    texts: list[str] = []
    rules: list[str] = []
    required = schema.get("required") or ()
    for place, (key, declared) in enumerate((schema.get("properties") or {}).items()):
        before, after = (text.replace("KEY", key) for text in shape.parameter)
        rule = f"value_{number}_{place}"
        value = _value(key, declared, schema, after, special, rule)
        text = f"{lark.literal(before, special)} {value.text}"
        texts.append(text if key in required else f"({text})?")
        rules += value.rules
    return Expression(" ".join(texts), tuple(rules))


def _value(
    key: str, declared: Any, schema: Mapping[str, Any], after: str, special: Mapping[str, int], rule: str
) -> Expression:
    """The value of one parameter and what is behind it."""
    end = lark.literal(after, special)
    written = as_text(declared, schema)
    if isinstance(written, tuple):
        return Expression(f"{lark.alternatives(lark.literal(text, {}) for text in written)} {end}")
    if written == "text":
        return Expression(*_free_text(after, special, rule))
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return Expression(f"{lark.json_value({**definitions, **declared})} {end}")


def _free_text(after: str, special: Mapping[str, int], rule: str) -> tuple[str, tuple[str, ...]]:
    """Any text up to the tag, and the space behind it. (New lines before the tag are not part of the value.)"""
    tag = after.strip()
    text, rules = lark.up_to(tag, special, rule)
    return f"{text} {lark.literal(after.partition(tag)[2], special)}", (rules,)


def _plain_parameters(schema: Mapping[str, Any] | None) -> bool:
    """Whether the arguments can stand as parameters, each as plain text."""
    if schema is None:
        return True
    if not isinstance(schema.get("properties", {}), Mapping) or "$ref" in schema:
        return False
    properties = schema.get("properties", {})
    if not set(schema.get("required") or ()) <= set(properties) or set(schema) - _OBJECT_KEYWORDS:
        return False
    return all(_plain_value(key, declared, schema) for key, declared in properties.items())


_OBJECT_KEYWORDS = (
    frozenset("type properties required additionalProperties $defs definitions $schema $id strict".split())
    | ANNOTATIONS
)


def _plain_value(key: str, declared: Any, schema: Mapping[str, Any]) -> bool:
    return isinstance(declared, Mapping) and "\n" not in key and ">" not in key and bool(as_text(declared, schema))
