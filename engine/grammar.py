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
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from engine.bounds import GrammarError as GrammarError
from engine.messages import GrammarSpec
from engine.schema import check_whitespace as check_whitespace
from engine.sources import LIMITS, compiled_form, on_deep_stack, plain

MAX_CACHED = 64  # compiled grammars kept by a compiler


def check(spec: GrammarSpec) -> None:
    """Raises GrammarError if `spec` is broken, unsupported or too large. Takes milliseconds, up to a second for the
    largest sources: off the event loop for long ones. Special tokens of a lark grammar are not looked up."""
    compiled_form(spec.kind, spec.source)


class Grammar:
    """The state of one sequence's constraint. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, spec: GrammarSpec, tokenizer: LLTokenizer) -> None:
        self.stop_ids: Collection[int] = ()  # what may end a complete output, beside the tokenizer's own end token
        self._matcher = matcher
        self._start_after = spec.start_after
        self._tokenizer = tokenizer
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
        self._spell_out(bits)
        if bits[self._eos_id >> 5] >> (self._eos_id & 31) & 1:
            for token in self.stop_ids:
                bits[token >> 5] |= np.uint32(1 << (token & 31))

    def _spell_out(self, bits: NDArray[np.uint32]) -> None:
        """Where the constraint leaves only a text that looks like a special token, the matcher allows that token, and
        would not take it: such text is written with ordinary tokens."""
        words = np.flatnonzero(bits)
        if len(words) != 1:
            return
        token = 32 * int(words[0]) + int(bits[words[0]]).bit_length() - 1
        if not self._tokenizer.is_special_token(token) or self._matcher.validate_tokens([token]):
            return
        forced = self._matcher.compute_ff_bytes().decode(errors="replace")
        if forced:
            spelled = self._tokenizer.greedy_tokenize(forced)[0]
            bits[words] = 0
            bits[spelled >> 5] = np.uint32(1 << (spelled & 31))

    def accept(self, token: int) -> bool:
        """Takes a generated token; False if the grammar does not allow it (the state is then unchanged). Raises
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
            raise GrammarError(plain(self._matcher.get_error()))

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
        grammar = compiled_form(spec.kind, spec.source)
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
        matcher = on_deep_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS))
        if matcher.is_error():
            raise GrammarError(plain(matcher.get_error()))
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
