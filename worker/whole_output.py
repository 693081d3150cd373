"""The constraint on a whole output, given those on its parts: thoughts first, then the answer, or calls.

Where the prompt has opened the thoughts and one token closes them, the constraint simply starts behind that token.
Else the whole output becomes one grammar: thoughts that may come, and then what must. It is never left out.

Knows tags and tokens, no requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.messages import GrammarSpec
from worker import lark
from worker.errors import BadRequest
from worker.parsers.names import HARMONY
from worker.parsers.reasoning import FAMILIES, Tags
from worker.parsers.registry import Formats
from worker.tool_grammar import Expression

_SPACE = "/[ \\n]{0,4}/"  # behind thoughts
_MESSAGES = "{0,8}"  # of reasoning and preamble before gpt-oss answers


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where an output begins: the rendered prompt, and the end of it that is a begun answer."""

    prompt: str
    prefill: str = ""

    def is_inside(self, tags: Tags) -> bool:
        return tags.opened_by(self.prompt, self.prefill)

    def is_behind(self, tags: Tags) -> bool:
        return any(self.prompt.rstrip().endswith(tag) for tag in tags.closes)


class WholeOutput:
    def __init__(self, added: Mapping[str, int], special: Mapping[str, int]) -> None:
        """Ids of all added tokens by their texts, and of the special ones among them."""
        self._added = added
        self._special = special

    def constrained(
        self,
        formats: Formats,
        beginning: Beginning,
        answer: GrammarSpec | None,
        calls: Expression | None,
        *,
        free: bool,
        param: str,
    ) -> GrammarSpec:
        """`answer` and `calls`: what is asked of them; one may be None, both = either may come. `free`: an answer
        without calls may be any text (harmony alone asks). `param` is blamed for what cannot be. Raises BadRequest."""
        if HARMONY in (formats.tool, formats.reasoning):
            return self._harmony(answer, calls, free, param)
        tags = FAMILIES.get(formats.reasoning or "")
        start_after = self._start_after(tags, beginning)
        if answer is not None and calls is None:
            if tags is None or start_after:
                return GrammarSpec(answer.kind, answer.source, start_after)
            whole = lark.body(answer)
            if whole is None:
                return _own_grammar(tags, beginning, answer, param)
            return self._with_thoughts(tags, beginning, Expression(whole))
        expression = _either(answer, calls, param)
        if tags is not None and not start_after:
            return self._with_thoughts(tags, beginning, expression)
        spec = lark.grammar(expression.text, *expression.rules)
        return GrammarSpec(spec.kind, spec.source, start_after)

    def _start_after(self, tags: Tags | None, beginning: Beginning) -> tuple[int, ...]:
        """The one token that ends the thoughts in which the output begins; () where there is none."""
        if tags is None or len(tags.closes) != 1 or tags.closes[0] not in self._added:
            return ()
        return (self._added[tags.closes[0]],) if beginning.is_inside(tags) else ()

    def _with_thoughts(self, tags: Tags, beginning: Beginning, answer: Expression) -> GrammarSpec:
        close, rules = lark.up_to(tags.closes[0], self._special, "thoughts")
        if beginning.is_inside(tags):
            return lark.grammar(f"{close} {_SPACE} {answer.text}", rules, *answer.rules)
        if beginning.is_behind(tags):
            return lark.grammar(answer.text, *answer.rules)
        opening = lark.alternatives(lark.literal(tag, self._special) for tag in tags.opens)
        return lark.grammar(f"({opening} {close} {_SPACE})? {answer.text}", rules, *answer.rules)

    def _harmony(self, answer: GrammarSpec | None, calls: Expression | None, free: bool, param: str) -> GrammarSpec:
        """Messages of reasoning and preamble, then a call or the final one."""

        def literal(text: str) -> str:
            return lark.literal(text, self._special)

        channels = lark.alternatives(literal(name) for name in ("analysis", "commentary"))
        before = f"{literal('<|channel|>')} {channels} {literal('<|message|>')} TEXT"
        message = f"message: {before} {literal('<|end|><|start|>assistant')}"
        final = literal("<|channel|>final<|message|>")
        options = [] if calls is None else [calls.text]
        if free:
            options.append(f"{final} TEXT")
        elif answer is not None:
            whole = lark.body(answer)
            if whole is None:
                raise BadRequest("a grammar cannot be combined with this model's form of answers", param=param)
            options.append(f"{final} {whole}")
        rules = () if calls is None else calls.rules
        return lark.grammar(f"message{_MESSAGES} {lark.alternatives(options)}", message, lark.TEXT, *rules)


def _own_grammar(tags: Tags, beginning: Beginning, answer: GrammarSpec, param: str) -> GrammarSpec:
    """A grammar of the client's own cannot be put behind thoughts: it applies from the first token on."""
    if beginning.is_inside(tags):
        raise BadRequest("a grammar cannot be combined with this model's reasoning: switch it off", param=param)
    return answer


def _either(answer: GrammarSpec | None, calls: Expression | None, param: str) -> Expression:
    """The answer in its format, or calls."""
    assert calls is not None
    if answer is None:
        return calls
    whole = lark.body(answer)
    if whole is None:
        text = "a grammar cannot be combined with tools that may be called; set tool_choice to none or required"
        raise BadRequest(text, param=param)
    return Expression(f"({whole} | {calls.text})", calls.rules)
