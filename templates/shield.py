"""Keeps what the user wrote apart from the control tokens that the template writes.

Before rendering, one character of everything in the user's values that could become (a part of) a control token is
replaced by a private stand-in of the same length; after rendering, the control tokens that the text spells are the
template's own, and the stand-ins become the user's characters again. Since lengths, blanks and all other characters
stay, templates may trim, slice, measure and compare the values as ever.

What is replaced in a value:
- the first character of control tokens ("<", "[" ...) wherever it occurs, unless it begins a phrase that the template
  looks for and that is no control token;
- one character of a value that could be the inner part of a token ("<" ~ name ~ ">"), unless the template itself
  names that word;
- whole words that are control tokens ("sop").
In assistant turns the reasoning delimiters that the template mentions ("<think>") stay as they are.

Knows nothing of messages or models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from markupsafe import Markup

from templates.conversation import REASONING_KEYS
from templates.rendered import Piece, TemplateError

# Tokens in brackets of some kind begin with one of these, or with a symbol beyond ASCII. Others are replaced as whole
# words only: values are often compared with, or escaped at, other characters.
OPENERS = "<[]"
# Values of "role" and "type" that templates compare with or write inside of control tokens.
PLAIN_WORDS = frozenset(
    "system developer user assistant tool function ipython observation "
    "text object array string number integer boolean null".split()
)
# Where stand-ins are taken from: rare, printable (Python's repr escapes others), neither letters nor blanks; behind
# them a large block, so that no request can use up all. Those that a request contains are left out.
STANDINS = (*range(0x1D000, 0x1D0F6), *range(0x20000, 0x2A6DF))
_REASONING = re.compile(r"think|thought|reason", re.IGNORECASE)


class ControlTokens:
    """The control tokens of one tokenizer, as one template uses them.

    `phrases` are the string constants of the template, `words` every name and constant in it, `hidden` further texts
    that the template shall not see in values, `source` its whole text.
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


class Shield:
    """The stand-ins of one request. `values` is everything the user sent, so that no stand-in occurs in it."""

    def __init__(self, control: ControlTokens, values: Any) -> None:
        self._control = control
        used: set[str] = set()
        for text in _strings(values):
            if not text.isascii():
                used |= set(text)
        self._free = (chr(code) for code in STANDINS if chr(code) not in used)
        self._standin: dict[str, str] = {}
        self._openers = [(opener, self._stand_in(opener)) for opener in sorted(control.openers)]

    def _stand_in(self, char: str) -> str:
        if char not in self._standin:
            if (standin := next(self._free, None)) is None:
                raise TemplateError("the messages use every character of a whole block of rare ones")
            self._standin[char] = standin
        return self._standin[char]

    def mask(self, value: Any, *, assistant: bool = False) -> Any:
        """A copy of a value of the request (strings, lists, objects with their keys) with the stand-ins in it."""
        if isinstance(value, str):
            return self._mask_text(value, assistant)
        if isinstance(value, Mapping):
            return {
                self.mask(key): item
                if key in ("role", "type") and isinstance(item, str) and item in PLAIN_WORDS
                else self.mask(item, assistant=assistant)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mask(item, assistant=assistant) for item in value]
        return value

    def mask_message(self, message: Mapping[str, Any], *, mixed: bool = False) -> dict[str, Any]:
        """A message: its own keys stay, and an assistant's words keep the reasoning delimiters (unless they are mixed
        with others' words)."""
        spoken = ("content", *REASONING_KEYS) if message.get("role") == "assistant" and not mixed else ()
        return {
            key: value if key == "role" and value in PLAIN_WORDS else self.mask(value, assistant=key in spoken)
            for key, value in message.items()
        }

    def _mask_text(self, text: str, assistant: bool) -> str:
        control = self._control
        if (at := control.inner_at(text)) is not None:
            text = self._replace_at(text, at)
        if hidden := control.hidden():
            text = hidden.sub(lambda match: self._replace_at(match[0], _replaceable(match[0])), text)
        kept = control.kept(assistant)
        if kept is None or not kept.search(text):
            return self._mask_openers(text)
        parts, position = [], 0
        for match in kept.finditer(text):
            parts += [self._mask_openers(text[position : match.start()]), match[0]]
            position = match.end()
        return "".join([*parts, self._mask_openers(text[position:])])

    def _mask_openers(self, text: str) -> str:
        for opener, standin in self._openers:
            text = text.replace(opener, standin)
        return text

    def _replace_at(self, text: str, at: int) -> str:
        return text[:at] + self._stand_in(text[at]) + text[at + 1 :]

    def reveal(self, text: str) -> str:
        """The user's characters in place of their stand-ins."""
        for char, standin in self._standin.items():
            text = text.replace(standin, char)
        return text

    def through(self, text: str, apply: Callable[[str], str]) -> str:
        """`apply`, which works character by character, as if the stand-ins were the real characters; what it makes of
        those is masked again."""
        if not self._standin:
            return apply(text)
        parts = re.split(f"([{''.join(self._standin.values())}]+)", str(text))
        results = [apply(part) if not index % 2 else self._mask_again(str(apply(self.reveal(part))))
                   for index, part in enumerate(parts)]  # fmt: skip
        joined = "".join(map(str, results))
        return Markup(joined) if isinstance(results[0], Markup) else joined

    def _mask_again(self, text: str) -> str:
        for char, standin in self._standin.items():
            text = text.replace(char, standin)
        return text

    def seen(self, text: str, phrase: str) -> str:
        """`text` as it is compared with `phrase`: the real characters, unless the phrase holds a control token (which
        no text of a user is)."""
        return text if self._control.find(phrase) else self.reveal(text)

    def split(self, text: str) -> tuple[Piece, ...]:
        """A rendered text in pieces: the template's control tokens, and what is between them with the user's own
        characters."""
        pieces: list[Piece] = []
        position = 0
        for start, end in self._control.find(text):
            if position < start:
                pieces.append(Piece(self.reveal(text[position:start]), control=False))
            pieces.append(Piece(text[start:end], control=True))
            position = end
        if position < len(text):
            pieces.append(Piece(self.reveal(text[position:]), control=False))
        return tuple(pieces)


def _is_opener(char: str) -> bool:
    return char in OPENERS or (not char.isascii() and not char.isalnum() and not char.isspace() and char != "▁")


def _last_letter(text: str) -> int:
    return max(index for index, char in enumerate(text) if char.isalnum())


def _replaceable(token: str) -> int:
    """A character that no trimming or escaping depends on."""
    return next((index for index, char in enumerate(token) if not char.isspace() and char not in '"\\'), 0)


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


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
