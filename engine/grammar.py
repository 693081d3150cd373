"""Constraints on the output text: a GrammarSpec becomes a matcher that yields a token mask a step (llguidance).

    check(spec)                                   # in the worker: a GrammarError says what is wrong, and where
    compiler = GrammarCompiler(tokenizer_path, vocab_size)
    grammar = compiler.compile(spec)              # one a sequence
    grammar.fill(row)                             # int32[ceil(V / 32)], bit i of word i // 32 set: token i is allowed
    grammar.accept(token); grammar.rollback(n); grammar.done

Importing this imports neither torch nor a tokenizer library.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.messages import GrammarSpec


class GrammarError(ValueError):
    """The constraint cannot be compiled. `where` is a path inside the source ("/properties/a"), "" = the whole."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where


def check(spec: GrammarSpec) -> None:
    """Raises GrammarError if `spec` is broken, unsupported or too large. Never compiles a source that is too large."""
    raise NotImplementedError


class Grammar:
    """The state of one sequence's constraint."""

    @property
    def done(self) -> bool:
        """The output is complete and nothing may follow but the end: the sequence finishes with STOP."""
        raise NotImplementedError

    @property
    def active(self) -> bool:
        """False while every token is allowed (`start_after` has not been generated yet): the row needs no mask."""
        raise NotImplementedError

    def fill(self, row: NDArray[np.int32]) -> None:
        """Writes the mask of the next token into `row`. Raises GrammarError if the mask is over its budget."""
        raise NotImplementedError

    def accept(self, token: int) -> bool:
        """Takes a generated token; False if the grammar does not allow it (the state is then unchanged)."""
        raise NotImplementedError

    def rollback(self, n: int) -> None:
        """Forgets the last `n` accepted tokens."""
        raise NotImplementedError


class GrammarCompiler:
    """Compiles constraints for one tokenizer; keeps the most recent ones. Thread-safe."""

    def __init__(self, tokenizer_path: str | Path, vocab_size: int, eos_ids: tuple[int, ...] = ()) -> None:
        """`tokenizer_path`: folder of tokenizer.json; `vocab_size`: columns of the logits."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises GrammarError; the request ends with code "grammar_failed", the others go on."""
        raise NotImplementedError

    def fill(self, rows: list[tuple[int, Grammar]], mask: NDArray[np.int32]) -> dict[int, GrammarError]:
        """Fills row i of `mask` ([B, ceil(V / 32)] int32, contiguous) for each (i, grammar), in parallel.
        -> the rows that failed; their requests end, the others go on."""
        raise NotImplementedError
