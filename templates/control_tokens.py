"""The control tokens of a tokenizer: where a text spells them, and what in a text could become one.

Knows strings only; `templates.shield` acts on what is found here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Tokens in brackets of some kind begin with one of these, or with a symbol beyond ASCII. Others are replaced as whole
# words only: values are often compared with, or escaped at, other characters.
OPENERS = "<[]"
_REASONING = re.compile(r"think|thought|reason", re.IGNORECASE)


class ControlTokens:
    """The control tokens of one tokenizer, as one template uses them.

    `phrases` are the string constants of the template, `words` those and the attributes that it reads, `hidden`
    further texts that the template shall not see in values, `source` its whole text.
    """

    def __init__(
        self,
        tokens: Iterable[str],
        phrases: Iterable[str] = (),
        words: Iterable[str] = (),
        hidden: Iterable[str] = (),
        source: str = "",
    ) -> None:
        self.tokens = frozenset(token for token in tokens if token.strip())
        phrases = set(phrases)
        self._words_of_template = frozenset(words)
        marked = {token for token in self.tokens if _is_opener(token[0])}
        self.openers = frozenset(token[0] for token in marked)
        self._whole_words = _alternatives(self.tokens - marked)
        self._hidden = _alternatives({*(self.tokens - marked), *hidden})
        self._lengths = sorted({len(token) for token in marked}, reverse=True)
        self._opener = _alternatives(self.openers)
        self._marked = frozenset(marked)
        self._phrases = {phrase for phrase in phrases if phrase[:1] in self.openers and self._is_no_token(phrase)}
        self.reasoning = {token for token in marked if _REASONING.search(token) and token in source}
        self._kept = {False: _alternatives(self._phrases), True: _alternatives(self._phrases | self.reasoning)}
        inner = [_inner_parts(token) for token in marked]
        self._ends = frozenset(part for ends, _ in inner for part in ends)
        self._middles = frozenset(part for _, middles in inner for part in middles)
        self._end_lengths = sorted({len(part) for part in self._ends})

    def _is_no_token(self, phrase: str) -> bool:
        """Neither holds a control token nor could be continued to one."""
        return not self.find(phrase) and not any(token.startswith(phrase) for token in self._marked)

    def find(self, text: str) -> list[tuple[int, int]]:
        """Where the text spells control tokens: (start, end) in order, the longest at each place."""
        found: list[tuple[int, int]] = []
        position = 0
        if self._opener is None and self._whole_words is None:
            return found
        for start in self._candidates(text):
            if start < position:
                continue
            end = self._token_end(text, start)
            if end:
                found.append((start, end))
                position = end
        return found

    def _candidates(self, text: str) -> list[int]:
        starts = [match.start() for pattern in (self._opener, self._whole_words) if pattern
                  for match in pattern.finditer(text)]  # fmt: skip
        return sorted(starts)

    def _token_end(self, text: str, start: int) -> int:
        for length in self._lengths:
            if text[start : start + length] in self._marked:
                return start + length
        match = self._whole_words.match(text, start) if self._whole_words else None
        return match.end() if match else 0

    def kept(self, assistant: bool) -> re.Pattern[str] | None:
        return self._kept[assistant]

    def hidden(self) -> re.Pattern[str] | None:
        """What is replaced as a whole word."""
        return self._hidden

    def inner_at(self, value: str) -> int | None:
        """The last letter of what a template could complete to a control token by writing around the value."""
        body = value.strip()
        start = len(value) - len(value.lstrip())
        if body in self._middles:
            return None if body in self._words_of_template else start + _last_letter(body)
        for length in self._end_lengths:
            if length > len(body):
                break
            if body[:length] in self._ends:
                return start + _last_letter(body[:length])
        return None


def _is_opener(char: str) -> bool:
    return char in OPENERS or (not char.isascii() and not char.isalnum() and not char.isspace() and char != "▁")


def _last_letter(text: str) -> int:
    return max(index for index, char in enumerate(text) if char.isalnum())


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _inner_parts(token: str) -> tuple[set[str], set[str]]:
    """Of "<|im_end|>": what a template's "<" or "<|" could be followed by to make it ("im_end|>" ...), and what it
    could be put around ("im_end" ...). Tokens without a word in them have none."""
    letters = [index for index, char in enumerate(token) if char.isalnum()]
    if not letters:
        return set(), set()
    starts = range(1, letters[0] + 1)
    ends = {token[start:] for start in starts}
    middles = {token[start:end] for start in starts for end in range(letters[-1] + 1, len(token))}
    return ends, middles
