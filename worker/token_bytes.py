"""Token id -> bytes: what a tokenizer's decoder makes of one token, in a table.

Knows the decoders of `tokenizer.json`: byte-level (GPT-2 and most models since), sentencepiece style (a mark for
spaces, byte tokens such as <0x0A>, one space dropped where a text begins), and, pair by pair, any other. Bytes and not
text, because a character may be spread over several tokens. Knows nothing of streams or stop strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as Backend

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
DropSpaces = Callable[[bytes], bytes]


class TokenBytes:
    """`alone(id)`: the bytes of a token inside a text. `after(previous, id)`: what it adds behind another token."""

    def __init__(self, backend: Backend, decoder: dict[str, Any] | None, added_ids: frozenset[int]) -> None:
        """`decoder` is the section of tokenizer.json; `added_ids` are the ids of added tokens."""
        self._backend = backend
        self._added_ids = added_ids
        steps = _flat(decoder)
        kinds = [step["type"] for step in steps]
        self._table: dict[int, bytes] = {}
        self._at_start: DropSpaces | None = None
        self._of_token: Callable[[str], bytes] | None = None
        if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
            self._of_token = _byte_level
            # Added tokens are plain text; the decoder takes those that happen to be spelled in its alphabet for bytes.
            added = ((token_id, backend.id_to_token(token_id)) for token_id in added_ids)
            self._table = {token_id: token.encode("utf-8") for token_id, token in added if token is not None}
        elif (sentencepiece := _sentencepiece(steps)) is not None:
            self._of_token, self._at_start = sentencepiece

    def alone(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; b"" for ids that the tokenizer does not have."""
        found = self._table.get(token_id)
        if found is None:
            found = self._table[token_id] = self._compute(token_id)
        return found

    def after(self, previous: int | None, token_id: int, *, spaces_between_added: bool = True) -> bytes:
        """The bytes that `token_id` adds to a text that ends with `previous` (None: it begins the text)."""
        if self._of_token is not None:
            data = self.alone(token_id)
            return self._at_start(data) if previous is None and self._at_start is not None else data
        if previous is None:
            return self.alone(token_id)
        if not spaces_between_added and previous in self._added_ids and token_id in self._added_ids:
            return (self._backend.id_to_token(token_id) or "").encode()
        before = self._decode([previous])
        both = self._decode([previous, token_id])
        return both[len(before) :].encode() if both.startswith(before) else self.alone(token_id)

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        return self._of_token(token) if self._of_token is not None else self._decode([token_id]).encode()

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder, sequences resolved."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flat(part)]


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the rest for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    table = byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token is kept as plain text
        return token.encode("utf-8")


def _sentencepiece(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], DropSpaces | None] | None:
    """How the steps turn a token into bytes and what they drop where a text begins; None: not of this kind."""
    replacements: list[tuple[str, str]] = []
    byte_tokens = False
    at_start: DropSpaces | None = None
    for index, step in enumerate(steps):
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                if step.get("prepend_scheme", "always") != "never":
                    at_start = _all_leading_spaces
            case {"type": "ByteFallback"}:
                byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(count), "stop": 0} if index == len(steps) - 1:
                at_start = _leading_spaces(count)
            case _:
                return None
    if not replacements:
        return None

    def of_token(token: str) -> bytes:
        if byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode("utf-8")

    return of_token, at_start


def _all_leading_spaces(data: bytes) -> bytes:
    return data.lstrip(b" ")


def _leading_spaces(count: int) -> DropSpaces:
    def drop(data: bytes) -> bytes:
        for _ in range(count):
            data = data.removeprefix(b" ")
        return data

    return drop
