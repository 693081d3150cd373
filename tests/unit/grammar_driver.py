"""Drives grammars with the demo model's tokenizer, without a model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.grammar import Grammar, GrammarCompiler
from engine.messages import GrammarSpec

VOCAB = 49152
EOS = 0  # <|endoftext|>, the end token of tokenizer.json
# Tokens that bring a JSON value to its end.
CLOSERS = ['"', "}", "]", '"}', '"]', "}]", '""', ",", "1", "0", ":", "{", "[", '{"', '["', '":']


class GrammarDriver:
    def __init__(self, folder: Path) -> None:
        self.compiler = GrammarCompiler(folder, VOCAB)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = [self.tokenizer.token_to_id(token) for token in CLOSERS]
        self._closers = np.array([token for token in ids if token is not None])
        self._row = np.zeros(-(-VOCAB // 32), dtype=np.int32)

    def grammar(self, kind: str, source: Any, start_after: tuple[int, ...] = ()) -> Grammar:
        text = source if isinstance(source, str) and kind not in ("json_schema", "choice") else json.dumps(source)
        return self.compiler.compile(GrammarSpec(kind, text, start_after))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def allowed(self, grammar: Grammar) -> np.ndarray:
        """The ids that the mask of the next token allows."""
        return np.flatnonzero(self._bits(grammar))

    def _bits(self, grammar: Grammar) -> np.ndarray:
        grammar.fill(self._row)
        return np.unpackbits(self._row.view(np.uint8), bitorder="little")

    def may_end(self, grammar: Grammar) -> bool:
        return bool(grammar.done or EOS in self.allowed(grammar))

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether `text` is a whole output. (Where the text is forced the mask allows its usual tokens only.)"""
        return all(grammar.accept(token) for token in self.ids(text)) and self.may_end(grammar)

    def sample(self, grammar: Grammar, seed: int, limit: int = 150, ways_out: tuple[str, ...] = ()) -> str | None:
        """A random output, leaning to its end; None if it did not end within `limit` tokens. `ways_out`: texts that end
        free text, tried now and then."""
        random = np.random.default_rng(seed)
        out: list[int] = []
        while len(out) < limit:
            if ways_out and random.random() < 0.2:
                out += self._try(grammar, ways_out[random.integers(len(ways_out))])
                if grammar.done:
                    return self.text(out)
            bits = self._bits(grammar)
            if bits[EOS] and (random.random() < 0.5 or bits.sum() == 1):
                assert grammar.accept(EOS) and grammar.done
                return self.text(out)
            bits[EOS] = 0
            ids = self._closers[bits[self._closers] == 1]
            if not len(ids) or random.random() < 0.25:
                ids = np.flatnonzero(bits)
            assert len(ids), f"dead end behind {self.tokenizer.decode(out)!r}"
            token = int(ids[random.integers(len(ids))])
            assert grammar.accept(token), f"refused a token that its own mask allows: {token}"
            out.append(token)
            if grammar.done:
                return self.text(out)
        return None

    def _try(self, grammar: Grammar, text: str) -> list[int]:
        """The tokens of `text`, all of them taken, or none."""
        ids = self.ids(text)
        taken = next((place for place, token in enumerate(ids) if not grammar.accept(token)), len(ids))
        if taken == len(ids):
            return ids
        grammar.rollback(taken)
        return []

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@cache
def driver() -> GrammarDriver:
    from builder.demo_model import ensure

    return GrammarDriver(ensure())
