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
from worker import lark
from worker.errors import BadRequest
from worker.parsers import registry
from worker.parsers.base import wants
from worker.parsers.harmony import Harmony
from worker.parsers.names import HARMONY
from worker.parsers.pipeline import Pipeline
from worker.parsers.reasoning import FAMILIES, Tags
from worker.parsers.registry import FORMATS, Formats
from worker.parsers.tool_parser import Tools
from worker.prompts import Prompt
from worker.protocol.constraints import Constraint
from worker.protocol.requests import ChatCompletionRequest
from worker.protocol.tools import Tool
from worker.tokenizer import Tokenizer
from worker.tool_grammar import Expression, Form, can_write, may_call, must_call

_FALLBACK = "json"  # the form of calls where the model's own cannot be constrained
_SPACE = "/[ \\n]{0,4}/"
_MESSAGES = "{0,8}"  # of reasoning and preamble before gpt-oss answers


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the answers of one request are constrained and read."""

    grammar: GrammarSpec | None = None
    parser: Callable[[], Pipeline] | None = None  # makes one for each choice; None: the text as it stands
    keep: frozenset[str] = frozenset()  # special tokens that must reach the parser


class OutputFormats:
    """What one model writes, and how its tokenizer spells it."""

    def __init__(self, formats: Formats, tokenizer: Tokenizer) -> None:
        self.formats = formats
        ids = tokenizer.added_tokens
        self._added = ids
        self._special = {text: token_id for text, token_id in ids.items() if token_id in tokenizer.special_ids}

    async def plan_completion(self, constraint: Constraint | None) -> OutputPlan:
        """Of a plain completion: no reasoning, no tools. Raises BadRequest."""
        if constraint is None:
            return OutputPlan()
        await asyncio.to_thread(_check, constraint.spec, constraint.param)
        return OutputPlan(constraint.spec)

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
        if form is not None:
            formats = Formats(form.name, formats.reasoning, formats.response_template)
        spec = None
        if constraint is not None or expression is not None:
            spec = self._behind_reasoning(formats, request, prompt, constraint, expression)
        return self._readable(request, prompt, formats, tools, spec)

    def _readable(
        self,
        request: ChatCompletionRequest,
        prompt: Prompt,
        formats: Formats,
        tools: tuple[Tool, ...],
        spec: GrammarSpec | None,
    ) -> OutputPlan:
        """The plan with a parser for what the model writes."""
        if not tools and formats.reasoning is None and formats.tool != HARMONY:
            return OutputPlan(spec)
        schemas = _schemas(tools)
        hide = request.skip_special_tokens

        def parser() -> Pipeline:
            return registry.pipeline(
                formats,
                schemas,
                prompt=_text(prompt),
                prefill=_prefill(request),
                special_tokens=tuple(self._special) if hide else (),
            )

        first = parser()
        return OutputPlan(spec, parser, frozenset(token for token in self._special if wants(first, token)))

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
        choice = request.choice_of_tools
        forced = choice.kind in ("required", "named")
        strict = [tool for tool in tools if tool.strict]
        if not tools or not (forced or strict or request.constraint is not None):
            return None, None
        for tool in tools if forced else strict:
            spec = GrammarSpec("json_schema", json.dumps(tool.parameters or {}))
            _check(spec, f"{tool.param}.parameters")
        schemas: Tools = _schemas(tools) if forced else {t.name: t.parameters if t.strict else {} for t in tools}
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

    # ---- reasoning

    def _behind_reasoning(
        self,
        formats: Formats,
        request: ChatCompletionRequest,
        prompt: Prompt,
        constraint: Constraint | None,
        calls: Expression | None,
    ) -> GrammarSpec:
        """The constraint on the whole output, given those on the answer and on calls (one may be missing)."""
        param = constraint.param if constraint is not None else "tools"
        forced = request.choice_of_tools.kind in ("required", "named")
        answer = None if constraint is None or forced else constraint.spec
        if formats.tool == HARMONY or formats.reasoning == HARMONY:
            return _checked(self._harmony(answer, calls, free=not forced and answer is None), param)
        tags = FAMILIES.get(formats.reasoning or "")
        start_after = self._start_after(tags, prompt, request)
        if answer is not None and calls is None:
            if start_after is not None:
                return GrammarSpec(answer.kind, answer.source, start_after)
            whole = lark.body(answer)
            if tags is None:
                return answer
            if whole is None:
                return self._own_grammar(tags, prompt, request, answer, param)
            return _checked(self._with_thoughts(tags, prompt, request, Expression(whole)), param)
        expression = calls if answer is None else self._either(answer, calls, param)
        assert expression is not None
        if tags is not None and start_after is None:
            return _checked(self._with_thoughts(tags, prompt, request, expression), param)
        spec = lark.grammar(expression.text, *expression.rules)
        return _checked(GrammarSpec(spec.kind, spec.source, start_after or ()), param)

    def _own_grammar(
        self, tags: Tags, prompt: Prompt, request: ChatCompletionRequest, answer: GrammarSpec, param: str
    ) -> GrammarSpec:
        """A grammar of the client's own cannot be put behind thoughts: it applies from the first token on."""
        if tags.opened_by(_text(prompt), _prefill(request)):
            raise BadRequest("a grammar cannot be combined with this model's reasoning: switch it off", param=param)
        return answer

    def _start_after(self, tags: Tags | None, prompt: Prompt, request: ChatCompletionRequest) -> tuple[int, ...] | None:
        """The one token that certainly ends the reasoning in which the output begins; None: there is none."""
        if tags is None or len(tags.closes) != 1 or tags.closes[0] not in self._added:
            return None
        return (self._added[tags.closes[0]],) if tags.opened_by(_text(prompt), _prefill(request)) else None

    def _with_thoughts(
        self, tags: Tags, prompt: Prompt, request: ChatCompletionRequest, answer: Expression
    ) -> GrammarSpec:
        close, rules = lark.up_to(tags.closes[0], self._special, "thoughts")
        if tags.opened_by(_text(prompt), _prefill(request)):
            return lark.grammar(f"{close} {_SPACE} {answer.text}", rules, *answer.rules)
        if any(_text(prompt).rstrip().endswith(tag) for tag in tags.closes):
            return lark.grammar(answer.text, *answer.rules)
        opening = lark.alternatives(lark.literal(tag, self._special) for tag in tags.opens)
        return lark.grammar(f"({opening} {close} {_SPACE})? {answer.text}", rules, *answer.rules)

    def _harmony(self, answer: GrammarSpec | None, calls: Expression | None, *, free: bool) -> GrammarSpec:
        def literal(text: str) -> str:
            return lark.literal(text, self._special)

        channels = lark.alternatives(literal(name) for name in ("analysis", "commentary"))
        before = f"{literal('<|channel|>')} {channels} {literal('<|message|>')} TEXT"
        message = f"message: {before} {literal('<|end|><|start|>assistant')}"
        final = literal("<|channel|>final<|message|>")
        options = [] if calls is None else [calls.text]
        rules = () if calls is None else calls.rules
        if free:
            options.append(f"{final} TEXT")
        elif answer is not None:
            whole = lark.body(answer)
            if whole is None:
                raise BadRequest("a grammar cannot be combined with this model's format of answers", param="grammar")
            options.append(f"{final} {whole}")
        return lark.grammar(f"message{_MESSAGES} {lark.alternatives(options)}", message, lark.TEXT, *rules)

    def _either(self, answer: GrammarSpec, calls: Expression | None, param: str) -> Expression:
        """The answer in its format, or calls."""
        whole = lark.body(answer)
        if whole is None or calls is None:
            text = "a grammar cannot be combined with tools that may be called; set tool_choice to none or required"
            raise BadRequest(text, param=param)
        return Expression(f"({whole} | {calls.text})", calls.rules)


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


def _checked(spec: GrammarSpec, param: str) -> GrammarSpec:
    _check(spec, param)
    return spec
