"""Outputs of every format, with what they say. `TOOLS` are the tools of all samples."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from worker.parsers.base import Content, Delta, Parser, Reasoning, ToolCallArgs, ToolCallStart, merge
from worker.parsers.registry import Formats, pipeline, tool_parser

TOOLS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "object": {"$ref": "#/$defs/thing"},
            "unit": {"enum": ["m", "km"]},
            "any": {},
        },
        "$defs": {"thing": {"type": "object"}},
    },
    "get_weather": None,
}
# Content, reasoning and calls (name, arguments).
Said = tuple[str, str, list[tuple[str, Any]]]

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"n": 5},
    {"flag": True},
    {"x": None},
    {"list": [1, 2]},
    {"object": {"p": {"q": 1}}},
    {"text": "t"},
    {"text": "echo {a,b"},
    {"text": "}{]["},
    {"text": 'a\\"b'},
    {"text": "line1\nline2"},
    {"text": '{"inner": "json"}'},
    {"text": "日本 🦊 é"},
    {"text": "Lyon, Rhone", "n": -3, "list": [{"a": [[]]}, "x"], "x": 1.5},
]


def _hermes(calls: list[tuple[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{_object(name, a)}\n</tool_call>" for name, a in calls)


def _object(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen3_coder(calls: list[tuple[str, Any]]) -> str:
    def one(name: str, arguments: Any) -> str:
        values = "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm45(calls: list[tuple[str, Any]]) -> str:
    def one(name: str, arguments: Any) -> str:
        values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in arguments.items())
        return f"<tool_call>{name}\n{values}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _invoke(tag: str, section: str, typed: bool) -> Callable[[list[tuple[str, Any]]], str]:
    def value(key: str, given: Any) -> str:
        kind = f' string="{str(isinstance(given, str)).lower()}"' if typed else ""
        return f'<{tag}parameter name="{key}"{kind}>{_plain(given)}</{tag}parameter>\n'

    def write(calls: list[tuple[str, Any]]) -> str:
        blocks = "".join(
            f'<{tag}invoke name="{name}">\n{"".join(value(k, v) for k, v in a.items())}</{tag}invoke>\n'
            for name, a in calls
        )
        return f"<{section}>\n{blocks}</{section}>"

    return write


def _deepseek_v3(calls: list[tuple[str, Any]]) -> str:
    blocks = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        for name, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: list[tuple[str, Any]]) -> str:
    blocks = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"


def _kimi_k2(calls: list[tuple[str, Any]]) -> str:
    blocks = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
        for i, (name, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{blocks}<|tool_calls_section_end|>"


def _list_of(key: str, before: str, after: str = "") -> Callable[[list[tuple[str, Any]]], str]:
    return lambda calls: before + "[" + ", ".join(_object(n, a, key) for n, a in calls) + "]" + after


def _python(calls: list[tuple[str, Any]], separator: str = ", ") -> str:
    return separator.join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)


def _gemma(start: str, quote: str, end: str) -> Callable[[list[tuple[str, Any]]], str]:
    def value(given: Any) -> str:
        match given:
            case str():
                return f"{quote}{given}{quote}"
            case dict():
                return "{" + ",".join(f"{k}:{value(v)}" for k, v in given.items()) + "}"
            case list():
                return "[" + ",".join(map(value, given)) + "]"
        return json.dumps(given)

    return lambda calls: "".join(f"{start}call:{name}{value(a)}{end}" for name, a in calls)


def _harmony(calls: list[tuple[str, Any]]) -> str:
    head = "<|channel|>commentary to=functions."
    blocks = [f"{head}{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>" for n, a in calls]
    return "<|start|>assistant".join(blocks)


# How each format writes calls. ReAct and FunctionGemma write one at a time, all others several.
WRITERS: dict[str, Callable[[list[tuple[str, Any]]], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": lambda calls: "; ".join(_object(n, a, "parameters") for n, a in calls),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "deepseek_dsml": _invoke("｜DSML｜", "｜DSML｜function_calls", typed=True),
    "minimax_m2": _invoke("", "minimax:tool_call", typed=False),
    "muse_glimmer": _invoke("atem:", "atem:function_calls", typed=False),
    "minicpm5": lambda calls: (
        _invoke("", "x", typed=False)(calls)
        .replace("<x>\n", "")
        .replace("</x>", "")
        .replace("invoke", "function")
        .replace("parameter", "param")
    ),
    "seed_oss": lambda calls: (
        _qwen3_coder(calls)
        .replace("tool_call>", "seed:tool_call>")
        .replace(">\n", ">")
        .replace("\n</parameter", "</parameter")
    ),
    "mistral": _list_of("arguments", "[TOOL_CALLS]"),
    "mistral_v11": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls),
    "glm45": _glm45,
    "kimi_k2": _kimi_k2,
    "react": lambda calls: "".join(f"\nAction: {n}\nAction Input: {json.dumps(a, indent=1)}\n" for n, a in calls),
    "pythonic": lambda calls: f"[{_python(calls)}]",
    "lfm2": lambda calls: f"<|tool_call_start|>[{_python(calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: f"<function_calls>\n{_python(calls, chr(10))}\n</function_calls>",
    "granite": _list_of("arguments", "<|tool_call|>"),
    "gemma4": _gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": _gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "phi4_mini": _list_of("arguments", "functools"),
    "internlm": lambda calls: "".join(
        f"<|action_start|><|plugin|>{_object(n, a, 'parameters')}<|action_end|>" for n, a in calls
    ),
    "tool_calls": _list_of("arguments", "<tool_calls>", "</tool_calls>"),
    "nemotron": _list_of("arguments", "<TOOLCALL>", "</TOOLCALL>"),
    "cohere": _list_of("parameters", "<|START_ACTION|>", "<|END_ACTION|>"),
    "command_r": _list_of("parameters", "Action: ```json\n", "\n```"),
    "gigachat3": lambda calls: "".join(f"<|function_call|>{_object(*call)}" for call in calls),
    "json": _list_of("arguments", ""),
    "harmony": _harmony,
}
# Formats whose calls stand at the very beginning of an answer: no text comes before.
BARE = {"llama3_json", "pythonic", "json", "harmony"}


def parse(make: Callable[[], Parser], pieces: list[str]) -> list[Delta]:
    parser = make()
    return merge([delta for piece in pieces for delta in parser.feed(piece)] + parser.close())


def cuts(text: str, rounds: int = 12) -> Iterator[list[str]]:
    """The same text whole, by characters, and in random pieces."""
    yield [text]
    yield list(text)
    for seed in range(rounds):
        chance = random.Random(seed)
        pieces, at = [], 0
        while at < len(text):
            size = chance.choice((1, 2, 3, 5, 8, 13, 40))
            pieces.append(text[at : at + size])
            at += size
        yield pieces


def said(deltas: list[Delta]) -> Said:
    """What the deltas say; asserts that calls are announced once, in order, before their arguments."""
    content, reasoning, calls = "", "", []
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(calls) and call_id and name
                calls.append((name, ""))
            case ToolCallArgs(index, fragment):
                assert index == len(calls) - 1 and fragment
                calls[index] = (calls[index][0], calls[index][1] + fragment)
    return content, reasoning, calls


def always(make: Callable[[], Parser], text: str) -> Said:
    """What an output says, however it is cut."""
    results = [said(parse(make, pieces)) for pieces in cuts(text)]
    assert all(result == results[0] for result in results), results
    return results[0]


def tools_in(format: str, text: str) -> Said:
    return always(lambda: tool_parser(format, TOOLS), text)


def whole_output(tool: str | None, reasoning: str | None, text: str, **options: Any) -> Said:
    tools = TOOLS if tool else {}
    return always(lambda: pipeline(Formats(tool, reasoning), tools, **options), text)
