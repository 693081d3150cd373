"""Reads the files that sentencepiece writes (*.model): protocol buffers, of which a few fields are needed.

Knows the format only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of pieces; 6 are bytes
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_NAMED = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2)}  # the field with the id, and the id by default


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[tuple[str, float, int]]  # (text, score, kind), by id
    model_type: str
    byte_fallback: bool
    named: dict[str, str]  # the texts of unk, bos and eos, as far as the model has them
    charsmap: bytes  # how characters are normalized; b"" = not at all
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    @classmethod
    def parse(cls, data: bytes) -> SentencePieceModel:
        """Raises ValueError for anything but a model whose spaces are marks in front of words."""
        pieces: list[tuple[str, float, int]] = []
        trainer: dict[int, bytes | int] = {}
        normalizer: dict[int, bytes | int] = {}
        try:
            for number, value in _fields(data):
                if number == 1:
                    pieces.append(_piece(value))
                elif number == 2:
                    trainer = dict(_fields(value))
                elif number == 3:
                    normalizer = dict(_fields(value))
        except (IndexError, struct.error, UnicodeDecodeError, KeyError, TypeError):
            raise ValueError("tokenizer.model is no sentencepiece model") from None
        if trainer.get(24) or not normalizer.get(5, 1):
            raise ValueError("tokenizer.model marks spaces behind words, or not at all; that is not supported")
        ids = {name: _signed(trainer.get(field, default)) for name, (field, default) in _NAMED.items()}
        charsmap = normalizer.get(2, b"")
        return cls(
            pieces=pieces,
            model_type=_MODEL_TYPES.get(_signed(trainer.get(3, 1)), "?"),
            byte_fallback=bool(trainer.get(35, 0)),
            named={name: pieces[token_id][0] for name, token_id in ids.items() if 0 <= token_id < len(pieces)},
            charsmap=charsmap if isinstance(charsmap, bytes) else b"",
            add_dummy_prefix=bool(normalizer.get(3, 1)),
            remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        )


def _piece(data: bytes | int) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    text, score = fields[1], fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise TypeError
    return text.decode(), struct.unpack("<f", score)[0], _signed(fields.get(3, NORMAL))


def _fields(data: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of the fields of a message: integers as they are, all else as bytes."""
    if not isinstance(data, bytes):
        raise TypeError
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}[kind]
        if at + size > len(data):
            raise IndexError
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number, the position behind it): seven bits a byte, the lowest first."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _signed(value: bytes | int) -> int:
    if not isinstance(value, int):
        raise ValueError("tokenizer.model is no sentencepiece model")
    return value - (1 << 64) if value >> 63 else value
