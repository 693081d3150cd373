"""Which format a model writes: read off its chat template, or named by the operator.

tool, reasoning = detect(template_source, model_type)       # None = none
tool = tool_format("qwen3_xml")                             # TOOL_CALL_PARSER; other servers' names too
parser = pipeline(Formats(tool, reasoning), tools, prompt=...)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from templates import CallWriter, calls_as_json
from worker.parsers.base import Parser, wants
from worker.parsers.forced import ForcedCalls
from worker.parsers.harmony import Harmony
from worker.parsers.names import (
    BY_MODEL_TYPE,
    HARMONY,
    REASONING_ALIASES,
    REASONING_MARKS,
    RESPONSE_TEMPLATE,
    TOOL_ALIASES,
    TOOL_MARKS,
)
from worker.parsers.pipeline import Pipeline
from worker.parsers.reasoning import FAMILIES, ReasoningParser
from worker.parsers.response_template import ResponseTemplateParser, supported
from worker.parsers.tool_parser import ToolParser, Tools
from worker.parsers.tools.deepseek import DeepSeek, DeepSeekV31
from worker.parsers.tools.gemma import FunctionGemma, Gemma4
from worker.parsers.tools.glm45 import Glm45
from worker.parsers.tools.granite import Granite
from worker.parsers.tools.hermes import Hermes
from worker.parsers.tools.internlm import InternLM
from worker.parsers.tools.invoke import DeepSeekDsml, MiniCPM5, MiniMaxM2, MuseGlimmer
from worker.parsers.tools.json_tags import JsonCalls
from worker.parsers.tools.kimi_k2 import KimiK2
from worker.parsers.tools.llama3_json import Llama3Json
from worker.parsers.tools.mistral import Mistral, MistralV11
from worker.parsers.tools.phi4_mini import Phi4Mini
from worker.parsers.tools.pythonic import Lfm2, Olmo3, Pythonic
from worker.parsers.tools.qwen3_coder import Qwen3Coder, SeedOss
from worker.parsers.tools.react import ReAct
from worker.parsers.tools.tagged_list import Cohere, CommandR, GigaChat3, Nemotron, ToolCalls

FORMATS: dict[str, type[ToolParser]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "llama3_json": Llama3Json,
    "deepseek_v3": DeepSeek,
    "deepseek_v31": DeepSeekV31,
    "deepseek_dsml": DeepSeekDsml,
    "mistral": Mistral,
    "mistral_v11": MistralV11,
    "glm45": Glm45,
    "kimi_k2": KimiK2,
    "react": ReAct,
    "pythonic": Pythonic,
    "lfm2": Lfm2,
    "olmo3": Olmo3,
    "granite": Granite,
    "minimax_m2": MiniMaxM2,
    "muse_glimmer": MuseGlimmer,
    "minicpm5": MiniCPM5,
    "seed_oss": SeedOss,
    "gemma4": Gemma4,
    "functiongemma": FunctionGemma,
    "phi4_mini": Phi4Mini,
    "internlm": InternLM,
    "tool_calls": ToolCalls,
    "nemotron": Nemotron,
    "cohere": Cohere,
    "command_r": CommandR,
    "gigachat3": GigaChat3,
    "json": JsonCalls,
}


class UnknownFormat(ValueError):
    """The operator named a format that is not known. The message lists those that are."""


@dataclass(frozen=True, slots=True)
class Formats:
    """What a model writes. Names as in FORMATS and FAMILIES, or "harmony", or "response_template"."""

    tool: str | None = None
    reasoning: str | None = None
    response_template: Any = None  # the checkpoint's own description


def detect(template_source: str, model_type: str = "") -> tuple[str | None, str | None]:
    """(tool format, reasoning format) of a model, from its chat template; None where it shows none."""
    tool = _first(TOOL_MARKS, template_source)
    reasoning = _first(REASONING_MARKS, template_source)
    if tool is None and reasoning is None:
        return BY_MODEL_TYPE.get(model_type, (None, None))
    return tool, reasoning


def formats(
    template_source: str,
    model_type: str = "",
    *,
    sample: str = "",
    response_template: Any = None,
    tool: str | None = None,
    reasoning: str | None = None,
) -> Formats:
    """A model's formats: `tool` and `reasoning` where the operator names them (TOOL_CALL_PARSER, REASONING_PARSER),
    else what the chat template shows, else the checkpoint's own description. `sample`: a chat with a tool call as the
    template renders it, which shows the format where the source puts it together from parts. Raises UnknownFormat."""
    shown_tool, shown_reasoning = detect(template_source, model_type)
    shown_tool = detect(sample)[0] or shown_tool
    if shown_tool is None and response_template is not None and supported(response_template):
        shown_tool = shown_reasoning = RESPONSE_TEMPLATE
    found = Formats(
        tool_format(tool) if tool else shown_tool,
        reasoning_format(reasoning) if reasoning else shown_reasoning,
        response_template,
    )
    for name, variable in ((found.tool, "TOOL_CALL_PARSER"), (found.reasoning, "REASONING_PARSER")):
        if name == RESPONSE_TEMPLATE and not supported(response_template):
            raise UnknownFormat(f"{variable}: the model has no response_template that can be read")
    return found


def tool_format(name: str) -> str:
    """A tool format by its name or alias. Raises UnknownFormat."""
    return _known(name, {**FORMATS, HARMONY: None, RESPONSE_TEMPLATE: None}, TOOL_ALIASES, "tool call")


def reasoning_format(name: str) -> str:
    """A reasoning format by its name or alias. Raises UnknownFormat."""
    return _known(name, {**FAMILIES, HARMONY: None, RESPONSE_TEMPLATE: None}, REASONING_ALIASES, "reasoning")


def tool_parser(name: str, tools: Tools) -> Parser:
    """A parser of one output in the format `name` (or an alias)."""
    name = tool_format(name)
    return Harmony(tools) if name == HARMONY else FORMATS[name](tools)


def call_writer(name: str | None) -> CallWriter:
    """How calls of a history are written for a model of this tool format whose template passes over them."""
    kind = FORMATS.get(name or "")
    return kind.write if kind else calls_as_json


def pipeline(
    formats: Formats,
    tools: Tools,
    *,
    prompt: str = "",
    prefill: str = "",
    special_tokens: tuple[str, ...] = (),
    forced: bool = False,
) -> Pipeline:
    """The parser of one output. `tools`: those that may be called, {} = none. `prompt`: the rendered prompt; `prefill`:
    its end, if that is a begun answer. `special_tokens`: texts of the tokenizer's, those that show are removed.
    `forced`: a constraint has calls written in the format's shape."""
    if formats.tool == RESPONSE_TEMPLATE or formats.reasoning == RESPONSE_TEMPLATE:
        stages: dict[str, Any] = {"tools": ResponseTemplateParser(formats.response_template, tools, prompt)}
    elif HARMONY in (formats.tool, formats.reasoning):
        stages = {"tools": Harmony(tools, forced=forced)}
    else:
        stages = _stages(formats, tools, prompt, prefill, forced)
    seen = [parser for parser in stages.values() if parser is not None]
    hidden = tuple(token for token in special_tokens if any(wants(parser, token) for parser in seen))
    return Pipeline(**stages, hidden=hidden)


def _stages(formats: Formats, tools: Tools, prompt: str, prefill: str, forced: bool) -> dict[str, Any]:
    kind = FORMATS[formats.tool] if tools and formats.tool else None
    reasoning = None
    if formats.reasoning is not None:
        tags = FAMILIES[formats.reasoning]
        trial: Callable[[], Parser] | None = None if kind is None else lambda: kind(tools)
        reasoning = ReasoningParser(
            tags,
            inside=tags.opened_by(prompt, prefill),
            tool_starts=kind.opens + kind.starts if kind else (),
            trial=trial,
        )
    calls: Parser | None = kind(tools) if kind else None
    if forced and isinstance(calls, ToolParser) and calls.shape is not None:
        calls = ForcedCalls(calls, calls.shape)
    return {"reasoning": reasoning, "tools": calls}


def _first(marks: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((name for pattern, name in marks if re.search(pattern, text, re.DOTALL)), None)


def _known(name: str, names: Mapping[str, Any], aliases: Mapping[str, str], what: str) -> str:
    key = name.strip().lower().replace("-", "_")
    key = aliases.get(key, key)
    if key not in names:
        raise UnknownFormat(f"unknown {what} parser {name!r}; known: {', '.join(sorted({*names, *aliases}))}")
    return key
