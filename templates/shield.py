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

from templates.control_tokens import ControlTokens
from templates.conversation import REASONING_KEYS
from templates.rendered import Piece, TemplateError

# Values of "role" and "type" that templates compare with or write inside of control tokens.
PLAIN_WORDS = frozenset(
    "system developer user assistant tool function ipython observation "
    "text object array string number integer boolean null".split()
)
# Where stand-ins are taken from: rare, printable (Python's repr escapes others), neither letters nor blanks; behind
# them a large block, so that no request can use up all. Those that a request contains are left out.
STANDINS = (*range(0x1D000, 0x1D0F6), *range(0x20000, 0x2A6DF))


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


def _replaceable(token: str) -> int:
    """A character that no trimming or escaping depends on."""
    return next((index for index, char in enumerate(token) if not char.isspace() and char not in '"\\'), 0)


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
