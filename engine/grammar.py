"""Constraints on the output text: a GrammarSpec becomes a matcher that yields a token mask a step (llguidance).

    check(spec)                                   # in the worker: a GrammarError says what is wrong, and where
    compiler = GrammarCompiler(tokenizer_path, vocab_size)
    grammar = compiler.compile(spec)              # one a sequence; compiler.submit(spec) does it in the background
    fill_rows([(row, grammar), ...], mask)        # int32[B, ceil(V / 32)]; bit i of word i // 32 set: i is allowed
    grammar.accept(token); grammar.rollback(n); grammar.done

Nothing here ever yields an unconstrained row for want of something better: a source that cannot be compiled, and a
mask that goes over its budget, are errors of the one request. Masks need only the tokens, not the logits: fill them
after the step's forward has been launched, and they cost nothing while the device computes.

Knows no text, requests or logits. Importing this imports neither torch nor a tokenizer library.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from engine.bounds import GrammarError as GrammarError
from engine.bounds import check_lark, check_pattern
from engine.messages import GrammarSpec
from engine.schema import bounded, children
from engine.schema import check_whitespace as check_whitespace

MAX_SOURCE_CHARS = 500_000
MAX_CACHED = 64  # compiled grammars kept by a compiler
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


def check(spec: GrammarSpec) -> None:
    """Raises GrammarError if `spec` is broken, unsupported or too large. Takes milliseconds, up to a second for the
    largest sources: off the event loop for long ones. Special tokens of a lark grammar are not looked up."""
    _grammar(spec.kind, spec.source)


@lru_cache(maxsize=MAX_CACHED)
def _grammar(kind: str, source: str) -> str:
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


_SKIPPED = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|%json\s*(?=\{)')


def _lark(source: str) -> str:
    """A lark (or GBNF) grammar, its embedded schemas bounded like any other."""
    try:
        source = any_to_lark(source)
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
    failed, messages = _deep(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS))
    return _plain(messages[0]) if failed else ""


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


def _plain(message: str) -> str:
    """A message of the compiler in one line: no excerpt of the source, no advice on options that no client has."""
    if "NoExtensionBias" in message:  # the compiler's word for a start that no text can follow
        return "The grammar of the request refers to itself and can never be completed."
    message = re.sub(r"^at \d+\(\d+\): |\n +\d+ \|.*", "", message, flags=re.DOTALL)
    return " ".join(message.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "").split())[:400]


_deep_lock = threading.Lock()


def _deep(work: Callable[[], _T]) -> _T:
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


class Grammar:
    """The state of one sequence's constraint. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, spec: GrammarSpec, tokenizer: LLTokenizer) -> None:
        self.stop_ids: Collection[int] = ()  # what may end a complete output, beside the tokenizer's own end token
        self._matcher = matcher
        self._start_after = spec.start_after
        self._row_words = _words(tokenizer.vocab_size)
        self._eos_id = tokenizer.eos_token
        self._free: list[int] = []  # tokens before the constraint began
        self._taken = 0  # tokens that the matcher has consumed
        self._begun = not self._start_after

    @property
    def done(self) -> bool:
        """The output is complete and nothing may follow, or an end token was accepted: finish with STOP, also under
        min_tokens and ignore_eos. (A grammar that could end or go on is not done: its mask allows the end tokens.)"""
        return self._begun and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def active(self) -> bool:
        """False while every token is allowed (`start_after` has not been generated yet): the row needs no mask."""
        return self._begun

    def fits(self, num_words: int) -> bool:
        """Whether the matcher can write into a row of so many words itself."""
        return num_words == self._row_words

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes the mask of the next token into `row`, int32[ceil(V / 32)], contiguous. After `done` only the end
        tokens are allowed. Raises GrammarError if the mask is over its budget."""
        if not self._begun:
            row.fill(-1)
            return
        full = row if self.fits(len(row)) else np.empty(self._row_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(full.ctypes.data, full.nbytes)
        if full is not row:
            row[:] = full[: len(row)]
        self.finish_row(row)

    def finish_row(self, row: NDArray[np.int32]) -> None:
        """Behind the matcher's own work: where the output may end, it may end with any of the request's stop ids.
        Raises GrammarError if the matcher has failed."""
        self._raise_if_failed()
        bits = row.view(np.uint32)
        if bits[self._eos_id >> 5] >> (self._eos_id & 31) & 1:
            for token in self.stop_ids:
                bits[token >> 5] |= np.uint32(1 << (token & 31))

    def accept(self, token: int) -> bool:
        """Takes a generated token; False if the grammar does not allow it (the state is then unchanged). A token that
        the mask allowed can still be refused where the constraint spells out the text of a special token. Raises
        GrammarError if taking it is over the budget."""
        if self._begun:
            taken = bool(self._matcher.try_consume_tokens([self._eos_id if token in self.stop_ids else token]))
            self._taken += taken
            if not taken:
                self._raise_if_failed()
            return taken
        self._free.append(token)
        self._begun = tuple(self._free[-len(self._start_after) :]) == self._start_after
        return True

    def fork(self) -> Grammar:
        """A second one in the same state."""
        other = copy.copy(self)
        other._matcher, other._free = self._matcher.deep_copy(), self._free[:]
        return other

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_plain(self._matcher.get_error()))

    def rollback(self, n: int) -> None:
        """Forgets the last `n` accepted tokens."""
        constrained = min(n, self._taken)
        if constrained:
            self._matcher.rollback(constrained)
            self._taken -= constrained
        if n > constrained:
            del self._free[constrained - n :]
            self._begun = not self._start_after


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def fill_rows(rows: Sequence[tuple[int, Grammar]], mask: NDArray[np.int32]) -> dict[int, GrammarError]:
    """Fills row i of `mask` (int32[B, ceil(V / 32)], contiguous) for each (i, grammar), several at a time.
    -> the rows that failed: their requests end, the others go on."""
    parallel = {row: grammar._matcher for row, grammar in rows if grammar.active and grammar.fits(mask.shape[1])}
    if len(parallel) > 1:
        pairs = [(matcher, row) for row, matcher in parallel.items()]
        _executor().unsafe_compute_mask_ptr(pairs, mask.ctypes.data, mask.shape[1] * 4, mask.shape[0])
    else:
        parallel = {}
    failed: dict[int, GrammarError] = {}
    for row, grammar in rows:
        try:
            (grammar.finish_row if row in parallel else grammar.fill)(mask[row])
        except GrammarError as error:
            failed[row] = error
    return failed


class GrammarCompiler:
    """Compiles constraints for one tokenizer and keeps the most recent ones. Thread-safe."""

    def __init__(self, tokenizer_path: str | Path, vocab_size: int) -> None:
        """`tokenizer_path`: folder of tokenizer.json, read at the first use; `vocab_size`: V, the columns of the
        logits."""
        self._path = Path(tokenizer_path)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises GrammarError; the request ends with code "grammar_failed", the others go on."""
        grammar = _grammar(spec.kind, spec.source)
        with self._lock:
            matcher = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            tokenizer = self._tokenizer
        assert tokenizer is not None
        return Grammar(matcher.deep_copy(), spec, tokenizer)

    def submit(self, spec: GrammarSpec) -> Future[Grammar]:
        """`compile` on a background thread: the first grammar also loads the tokenizer (about a second)."""
        return self._background.submit(self.compile, spec)

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        tokenizer = self._tokenizer
        matcher = _deep(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS))
        if matcher.is_error():
            raise GrammarError(_plain(matcher.get_error()))
        return matcher

    def _load(self) -> LLTokenizer:
        try:
            document = json.loads((self._path / "tokenizer.json").read_text(encoding="utf-8"))
            vocabulary = _highest_id(document) + 1
            text = json.dumps(document | {"truncation": None, "padding": None})
            return LLTokenizer(text, n_vocab=max(self._vocab_size, vocabulary))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise GrammarError("this model's tokenizer does not support structured output") from error


def _words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def _highest_id(document: dict[str, Any]) -> int:
    vocabulary = document["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    return max([*ids, *(token["id"] for token in document.get("added_tokens") or ())], default=0)
