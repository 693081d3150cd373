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
        grammar.fill(self._row)
        return np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little"))

    def may_end(self, grammar: Grammar) -> bool:
        return bool(grammar.done or EOS in self.allowed(grammar))

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether `text` is a whole output. (Where the text is forced the mask allows its usual tokens only.)"""
        return all(grammar.accept(token) for token in self.ids(text)) and self.may_end(grammar)

    def sample(self, grammar: Grammar, seed: int, limit: int = 150) -> str | None:
        """A random output, leaning to its end; None if it did not end within `limit` tokens."""
        random = np.random.default_rng(seed)
        out: list[int] = []
        while len(out) < limit:
            ids = self.allowed(grammar)
            assert len(ids), f"dead end behind {self.tokenizer.decode(out)!r}"
            if EOS in ids and (len(ids) == 1 or random.random() < 0.5):
                assert grammar.accept(EOS) and grammar.done
                return self.text(out)
            ids = ids[ids != EOS]
            short = np.intersect1d(ids, self._closers)
            token = int(random.choice(short if len(short) and random.random() < 0.7 else ids))
            assert grammar.accept(token), f"refused a token that its own mask allows: {token}"
            out.append(token)
            if grammar.done:
                return self.text(out)
        return None

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@cache
def driver() -> GrammarDriver:
    from builder.demo_model import ensure

    return GrammarDriver(ensure())
