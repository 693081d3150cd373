"""A constraint on the beams of a search, kept here: the engine draws one token a request, and knows no beams.

The engine's logprobs are the model's own, before any mask. So for each beam it is asked for those tokens that the
constraint allows: by name where they are few, else by so many of the best that enough allowed ones must be among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.grammar import Grammar
from engine.messages import TokenLogprobs


@dataclass(frozen=True)
class BeamGrammar:
    """The state behind one beam; beams that divide take a fork each."""

    grammar: Grammar
    vocab_size: int

    @cached_property
    def _allowed(self) -> NDArray[np.bool_]:
        """[V]"""
        row = np.zeros(-(-self.vocab_size // 32), dtype=np.int32)
        self.grammar.fill(row)
        return np.unpackbits(row.view(np.uint8), bitorder="little")[: self.vocab_size].astype(np.bool_)

    def wanted(self, count: int) -> tuple[int, tuple[int, ...]]:
        """(how many of the best, which by name) to ask the engine for, so that the `count` best allowed are there."""
        num_allowed = int(self._allowed.sum())
        if num_allowed <= self.vocab_size // 2:
            return 1, tuple(np.flatnonzero(self._allowed).tolist())
        return min(self.vocab_size, count + self.vocab_size - num_allowed), ()

    def best(self, top: TokenLogprobs, count: int) -> TokenLogprobs:
        """Of what the engine answered, the `count` best allowed, in descending order."""
        pairs = dict(zip(top.token_ids[1:], top.logprobs[1:], strict=True))
        ids = sorted((token for token in pairs if self._allowed[token]), key=lambda token: -pairs[token])[:count]
        logprobs = [pairs[token] for token in ids]
        return TokenLogprobs((top.token_ids[0], *ids), (top.logprobs[0], *logprobs), top.rank)

    def after(self, token: int) -> BeamGrammar:
        """The state behind an allowed token. Raises GrammarError if that is over the budget."""
        grammar = self.grammar.fork()
        grammar.accept(token)
        return BeamGrammar(grammar, self.vocab_size)

    @property
    def done(self) -> bool:
        return self.grammar.done
