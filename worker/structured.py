"""What an answer may look like: the request's format, schema, choice of tools -> a grammar for the engine and a parser.

    output = OutputFormats(formats, tokenizer)
    plan = await output.plan(request, prompt)      # BadRequest: what cannot be kept, and where
    plan.grammar, plan.parser(), plan.keep

The rules:

- response_format, structured_outputs, guided_*: the answer; behind the reasoning, if the model reasons.
- tool_choice required or named: calls in the model's own form where it can be constrained, else as a JSON array.
- tool_choice auto: free, unless a tool is strict; together with a format for the answer: one or the other.

A constraint is never dropped: what cannot be compiled or enforced is a 400 that names the field.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine import grammar as engine_grammar
from engine.grammar import GrammarError
from engine.messages import GrammarSpec
from worker.errors import BadRequest
from worker.parsers import registry
from worker.parsers.base import wants
from worker.parsers.harmony import Harmony
from worker.parsers.names import HARMONY, RESPONSE_TEMPLATE
from worker.parsers.pipeline import Pipeline
from worker.parsers.reasoning import FAMILIES
from worker.parsers.registry import FORMATS, Formats
from worker.parsers.tool_parser import Tools
from worker.prompts import Prompt
from worker.protocol.constraints import Constraint
from worker.protocol.requests import ChatCompletionRequest
from worker.protocol.tools import Tool
from worker.tokenizer import Tokenizer
from worker.tool_grammar import Expression, Form, as_object, can_write, may_call, must_call
from worker.whole_output import Beginning, WholeOutput

_ANY_OBJECT = {"type": "object"}  # arguments that nothing is asked of
_FALLBACK = "json"  # the form of calls where the model's own cannot be constrained


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the answers of one request are constrained and read."""

    grammar: GrammarSpec | None = None
    parser: Callable[[], Pipeline] | None = None  # makes one for each choice; None: the text as it stands
    keep: frozenset[str] = frozenset()  # special tokens that must reach the parser
    param: str | None = None  # the field that asked for the grammar, for errors of the engine


class OutputFormats:
    """What one model writes, and how its tokenizer spells it."""

    def __init__(self, formats: Formats, tokenizer: Tokenizer) -> None:
        self.formats = formats
        ids = tokenizer.added_tokens
        self._special = {text: token_id for text, token_id in ids.items() if token_id in tokenizer.special_ids}
        self._whole = WholeOutput(ids, self._special)

    async def plan_completion(self, constraint: Constraint | None) -> OutputPlan:
        """Of a plain completion: no reasoning, no tools. Raises BadRequest."""
        if constraint is None:
            return OutputPlan()
        await asyncio.to_thread(_check, constraint.spec, constraint.param)
        return OutputPlan(constraint.spec, param=constraint.param)

    async def plan(self, request: ChatCompletionRequest, prompt: Prompt) -> OutputPlan:
        """Of a chat. Raises BadRequest. What has to be compiled is, on another thread: it can take a second."""
        compiles = request.constraint is not None or bool(_callable_tools(request))
        return await asyncio.to_thread(self._plan, request, prompt) if compiles else self._plan(request, prompt)

    def _plan(self, request: ChatCompletionRequest, prompt: Prompt) -> OutputPlan:
        tools = _callable_tools(request)
        formats = self._formats(bool(tools), prompt)
        constraint = request.constraint
        if constraint is not None:
            _check(constraint.spec, constraint.param)
        form, expression = self._calls(request, formats, tools)
        spec = param = None
        if constraint is not None or expression is not None:
            if formats.reasoning == RESPONSE_TEMPLATE:  # the constraint holds from the first token: no thoughts come
                formats = Formats(None, None)
            if form is not None:
                formats = Formats(form.name, formats.reasoning)
            forced = request.choice_of_tools.forces
            param = "functions" if request.legacy_functions else "tools"
            answer = None
            if constraint is not None and not forced:
                param, answer = constraint.param, constraint.spec
            beginning = Beginning(_text(prompt), _prefill(request))
            free = answer is None and not forced
            spec = self._whole.constrained(formats, beginning, answer, expression, free=free, param=param)
            _check(spec, param)
        return self._readable(request, prompt, formats, tools, spec, param)

    def _readable(
        self,
        request: ChatCompletionRequest,
        prompt: Prompt,
        formats: Formats,
        tools: tuple[Tool, ...],
        spec: GrammarSpec | None,
        param: str | None,
    ) -> OutputPlan:
        """The plan with a parser for what the model writes."""
        if not tools and formats.reasoning is None and formats.tool != HARMONY:
            return OutputPlan(spec, param=param)
        schemas = _schemas(tools)
        hide = request.skip_special_tokens

        def parser() -> Pipeline:
            return registry.pipeline(
                formats,
                schemas,
                prompt=_text(prompt),
                prefill=_prefill(request),
                special_tokens=tuple(self._special) if hide else (),
                forced=request.choice_of_tools.forces,
            )

        first = parser()
        keep = frozenset(token for token in self._special if wants(first, token))
        return OutputPlan(spec, parser, keep, param)

    def _formats(self, with_tools: bool, prompt: Prompt) -> Formats:
        formats = self.formats
        if prompt.rendered is not None and prompt.rendered.react:
            return Formats("react", formats.reasoning if formats.reasoning in FAMILIES else None)
        if with_tools and formats.tool is None:
            return Formats(_FALLBACK, formats.reasoning, formats.response_template)
        return formats

    # ---- calls

    def _calls(
        self, request: ChatCompletionRequest, formats: Formats, tools: tuple[Tool, ...]
    ) -> tuple[Form | None, Expression | None]:
        """(form that calls must have, the constraint on them); None = as the model likes."""
        choice, forced = request.choice_of_tools, request.choice_of_tools.forces
        strict = [tool for tool in tools if tool.strict]
        if not tools or not (forced or strict or request.constraint is not None):
            return None, None
        kept = {tool.name: _kept_parameters(tool) for tool in (tools if forced else strict)}
        kind = FORMATS.get(formats.tool or "")
        # Where arguments stand one by one, only the schema says which there are.
        all_kept = forced or (kind is not None and kind.shape is not None and kind.shape.parameter is not None)
        loose = {tool.name: tool.parameters if all_kept else _ANY_OBJECT for tool in tools}
        schemas: Tools = {**loose, **kept}
        many = request.parallel_tool_calls and not request.legacy_functions and choice.kind != "named"
        form = self._form(formats, schemas)
        if forced or request.constraint is not None or formats.tool == HARMONY:
            form = form or Form(_FALLBACK, FORMATS[_FALLBACK].shape)  # type: ignore[arg-type]
            return form, must_call(form, schemas, self._special, many=many)
        if form is None:
            text = (
                "strict cannot be kept with this model's form of calls unless tool_choice is required or names a tool"
            )
            raise BadRequest(text, param=f"{strict[0].param}.strict", code="unsupported_parameter")
        return form, may_call(form, schemas, self._special, many=many)

    def _form(self, formats: Formats, tools: Tools) -> Form | None:
        if formats.tool == HARMONY:  # never text with calls in it: each has a message of its own
            return Form(HARMONY, Harmony.shape)
        kind = FORMATS.get(formats.tool or "")
        if kind is None or kind.shape is None:
            return None
        marks = (*kind.opens, *kind.starts, *([kind.trigger] if kind.trigger else []))
        form = Form(formats.tool or "", kind.shape, marks)
        return form if can_write(form, tools) else None


def _callable_tools(request: ChatCompletionRequest) -> tuple[Tool, ...]:
    """Those that an answer may call."""
    choice = request.choice_of_tools
    match choice.kind:
        case "none":
            return ()
        case "named":
            return tuple(tool for tool in request.all_tools if tool.name == choice.name)
    allowed = choice.allowed
    return tuple(tool for tool in request.all_tools if allowed is None or tool.name in allowed)


def _kept_parameters(tool: Tool) -> Mapping[str, Any] | None:
    """The schema of arguments that a constraint keeps. Raises BadRequest."""
    if tool.parameters is None:
        return None
    param = f"{tool.param}.parameters"
    try:
        schema = as_object(tool.parameters)
    except ValueError:
        text = f"{param}: must be the schema of an object, which arguments are"
        raise BadRequest(text, param=param, code="invalid_json_schema") from None
    _check(GrammarSpec("json_schema", json.dumps(schema)), param)
    return schema


def _schemas(tools: tuple[Tool, ...]) -> dict[str, Mapping[str, Any] | None]:
    return {tool.name: tool.parameters for tool in tools}


def _text(prompt: Prompt) -> str:
    return prompt.rendered.text if prompt.rendered is not None else prompt.text or ""


def _prefill(request: ChatCompletionRequest) -> str:
    """What of the answer the request brought itself."""
    content = request.messages[-1].get("content") if request.continue_final_message else None
    return content if isinstance(content, str) else ""


def _check(spec: GrammarSpec, param: str) -> None:
    try:
        engine_grammar.check(spec)
    except GrammarError as error:
        code = "invalid_json_schema" if spec.kind in ("json_schema", "json_object") else "invalid_grammar"
        place = f" (at {error.where})" if error.where else ""
        raise BadRequest(f"{param}{place}: {error.message}", param=param, code=code) from None
