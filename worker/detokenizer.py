"""Token ids -> text, incrementally, for one choice.

Text goes out as soon as it is certain: a character when its last byte is there, and nothing that may still turn out to
be the start of a stop string. Cutting the ids differently never changes the whole text. Constant work per token. Knows
nothing of finish reasons or parsers.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence

from worker.stops import StopMatcher
from worker.tokenizer import Tokenizer


class Detokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
        previous: int | None = None,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        """`stop` strings count once they end behind the first `min_tokens` tokens; `include_stop_str` keeps them in the
        text. `previous`: the token that the text goes on from; None if it is a text of its own (which sentencepiece
        begins without a space). `keep`: special tokens that are never skipped, since a parser wants to see them."""
        self._tokenizer = tokenizer
        kept = {tokenizer.added_tokens[token] for token in keep if token in tokenizer.added_tokens}
        self._skip = tokenizer.special_ids - kept if skip_special_tokens else frozenset()
        self._spaces = spaces_between_special_tokens
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._previous = previous
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""  # decoded, but possibly the start of a stop string
        self.stopped: str | None = None
        self.num_tokens = 0  # ids consumed; ids behind a stop string are not

    @property
    def has_stops(self) -> bool:
        return self._matcher is not None

    def feed(self, ids: Sequence[int]) -> str:
        """Consumes ids up to a stop string and returns the text that has become certain."""
        parts = []
        for token_id in ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            if token_id not in self._skip:
                parts.append(self._push(self._utf8.decode(self._bytes(token_id))))
        return "".join(parts)

    def close(self) -> str:
        """The rest, at the end of generation: held text, and U+FFFD for a character that never became whole."""
        if self.stopped is not None:
            return ""
        text = self._push(self._utf8.decode(b"", final=True))
        rest, self._pending = self._pending, ""
        return text if self.stopped is not None else text + rest

    def fork(self) -> Detokenizer:
        """A second one in the same state: a beam that divides."""
        other = copy.copy(self)
        other._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        other._utf8.setstate(self._utf8.getstate())
        other._matcher = copy.deepcopy(self._matcher)
        return other

    def _bytes(self, token_id: int) -> bytes:
        data = self._tokenizer.bytes_after(self._previous, token_id, spaces_between_special_tokens=self._spaces)
        self._previous = token_id
        return data

    def _push(self, text: str) -> str:
        if self._matcher is None:
            return text
        found = self._matcher.scan(text, active=self.num_tokens > self._min_tokens)
        text = self._pending + text if found is None else self._pending + text[: found[1]]
        if found is not None:
            self.stopped, self._pending = found[0], ""
            return text if self._include_stop_str else text[: len(text) - len(found[0])]
        held = 0 if self._include_stop_str else self._matcher.held
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]
