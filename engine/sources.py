"""The sources of constraints -> the grammar engine's own form, once they are known to be sound and of bounded size.

    compiled_form("regex", "a+")        # GrammarError says what is wrong, and where

Needs no tokenizer: special tokens of a lark grammar are looked up only when it is compiled for one.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.bounds import GrammarError, check_lark, check_pattern
from engine.schema import bounded, children

MAX_SOURCE_CHARS = 500_000
# About 35 ms for a mask and 30 MB for an automaton; beyond that the request ends.
LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    step_lexer_fuel=500_000,
    step_max_items=100_000,
    max_lexer_states=30_000,
    verbose_errors=False,
)
_STACK_BYTES = 128 << 20  # virtual; the compiler recurses as deep as a schema's references reach
_MAX_TRIES = 200  # compilations spent on finding the place of an error
_T = TypeVar("_T")


@lru_cache(maxsize=64)
def compiled_form(kind: str, source: str) -> str:
    """The checked source in the compiler's own form."""
    if len(source) > MAX_SOURCE_CHARS:
        raise GrammarError(f"is longer than {MAX_SOURCE_CHARS} characters")
    if kind in ("json_schema", "json_object"):
        schema = bounded(_json(source) if kind == "json_schema" else {"type": "object"})
        grammar = LLMatcher.grammar_from_json_schema(schema)
        if problem := _problem(grammar):
            raise GrammarError(problem, _place(schema, problem))
        return grammar
    if kind == "regex":
        check_pattern(source)
        grammar = LLMatcher.grammar_from_regex(source)
    elif kind == "choice":
        choices = [json.dumps(choice, ensure_ascii=False) for choice in _json(source)]
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
    elif kind == "lark":
        grammar = LLMatcher.grammar_from_lark(_lark(source))
    else:
        raise GrammarError(f"unknown kind of constraint {kind!r}")
    if problem := _problem(grammar):
        raise GrammarError(problem)
    return grammar


def _json(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"is not valid JSON: {error}") from None


# The rule that every lark grammar has, as it may be written; in GBNF there may be a rule of that name, too.
_LARK_START = re.compile(r"^\s*(?:%llguidance\b|[?!]*start\s*(?:\.\s*-?\d+\s*)?:(?!:=))", re.MULTILINE)
_SKIPPED = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|%json\s*(?=\{)')


def _lark(source: str) -> str:
    """A lark (or GBNF) grammar, its embedded schemas bounded like any other."""
    try:
        source = source if _LARK_START.search(source) else gbnf_to_lark(source)
    except Exception as error:  # the converter raises its own kinds, and RecursionError
        raise GrammarError(f"is not a grammar: {str(error)[:300]}") from None
    whole, rest = "", ""  # with schemas, without
    at = 0
    while match := _SKIPPED.search(source, at):
        before, at = source[at : match.start()], match.end()
        whole += before + match[0]
        rest += before + ("" if match[0].startswith(("//", "%json")) else match[0])
        if match[0].startswith("%json"):
            try:
                schema, at = json.JSONDecoder().raw_decode(source, at)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"has a %json that is not valid JSON: {error}") from None
            whole += json.dumps(bounded(schema))
    check_lark(rest + source[at:])
    return whole + source[at:]


def _problem(grammar: str) -> str:
    """The compiler's word on a grammar, "" if it is fine."""
    failed, messages = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS))
    return plain(messages[0]) if failed else ""


def _place(schema: dict[str, Any], problem: str) -> str:
    """The path of the innermost subschema that has the same problem by itself."""
    definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    path, node, tries = "", schema, 0
    while True:
        for step, child in children(node):
            tries += 1
            if tries > _MAX_TRIES:
                return path
            if isinstance(child, dict) and _problem(LLMatcher.grammar_from_json_schema(definitions | child)) == problem:
                path, node = path + step, child
                break
        else:
            return path


def plain(message: str) -> str:
    """A message of the compiler in one line: no excerpt of the source, no advice on options that no client has."""
    if "NoExtensionBias" in message:  # the compiler's word for a start that no text can follow
        return "The grammar of the request refers to itself and can never be completed."
    message = re.sub(r"^at \d+\(\d+\): |\n +\d+ \|.*", "", message, flags=re.DOTALL)
    return " ".join(message.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "").split())[:400]


_deep_lock = threading.Lock()


def on_deep_stack(work: Callable[[], _T]) -> _T:
    """`work()` on a thread with a large stack."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    with _deep_lock:  # the size is a setting of the whole process
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()
