"""Text <-> token ids, on the `tokenizers` library alone: importing this never imports torch.

Two encoders share one vocabulary:

- `encode` is for raw prompts. Added tokens (<|im_end|>, <tool_call> ...) that the text spells become those tokens, as
  they do in transformers.
- `encode_pieces` is for rendered chats. Only the pieces marked as control tokens become control tokens; the same
  characters in any other piece are text. It works on a copy of the tokenizer in which every added token is spelled by a
  secret name, and encodes the whole prompt in one go with the control pieces renamed: so splitting, normalizing and
  stripping happen exactly as transformers does them on the whole string, and no user can spell a control token.

Knows nothing of templates, requests or generation settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from worker.control_tokens import TokenizerError, chat_backend, read_backend, secret_names
from worker.token_bytes import TokenBytes

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Piece(Protocol):
    """A part of a rendered prompt (`templates.Piece`)."""

    @property
    def text(self) -> str: ...
    @property
    def control(self) -> bool: ...


class Tokenizer:
    """One model's tokenizer. Thread-safe; encoding releases the GIL."""

    def __init__(self, document: dict[str, Any], config: dict[str, Any]) -> None:
        """`document` is tokenizer.json, `config` tokenizer_config.json ({} if the model has none)."""
        self._backend = read_backend(document | {"truncation": None, "padding": None})
        _add_tokens(self._backend, config)
        added = self._backend.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = TokenBytes(self._backend, document.get("decoder"), frozenset(added))
        self._names = secret_names(added)
        self._chat_backend = chat_backend(document, added, self._names)

        vocabulary = self._backend.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token_chars = max(map(len, vocabulary), default=1)
        self.bos_token = _content(config.get("bos_token"))
        self.eos_token = _content(config.get("eos_token"))
        self.bos_id = self._id(self.bos_token)
        self.eos_ids = () if (eos := self._id(self.eos_token)) is None else (eos,)
        self.prefix_ids = self._prefix_ids(config)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """From the files of a model folder. Raises TokenizerError if there is no usable tokenizer.json."""
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError("the model folder has no tokenizer.json")
        config_file = model_dir / "tokenizer_config.json"
        map_file = model_dir / "special_tokens_map.json"
        config: dict[str, Any] = {}
        for source in (map_file, config_file):
            if source.is_file():
                config |= _json(source)
        return cls(_json(file), config)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a raw prompt. `add_special_tokens` puts what the tokenizer puts before a text (BOS); what it would put
        behind (EOS) is left out, since the text is to be continued."""
        ids = _encode(self._backend, text)
        return [*self.prefix_ids, *ids] if add_special_tokens else ids

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of a rendered chat. The text between two texts that follow each other directly is cut; everything else
        is encoded in one go. A control piece that the vocabulary lacks is encoded as text."""
        ids: list[int] = []
        run: list[str] = []  # what is encoded together
        after_text = False
        for piece in pieces:
            token_id = self.added_tokens.get(piece.text) if piece.control else None
            if token_id is not None:
                run.append(self._names[token_id])
            elif piece.control and (token_id := self._id(piece.text)) is not None:
                # A token that no text becomes: the tokenizer would split it.
                ids += [*_encode(self._chat_backend, "".join(run)), token_id]
                run = []
            else:
                if after_text and not piece.control:
                    ids += _encode(self._chat_backend, "".join(run))
                    run = []
                run.append(piece.text)
            after_text = not piece.control
        return ids + _encode(self._chat_backend, "".join(run))

    def decode(
        self, ids: Iterable[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of ids that begin a text. Bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        data = bytearray()
        previous: int | None = None
        for token_id in ids:
            if skip_special_tokens and token_id in self.special_ids:
                continue
            data += self._bytes.after(previous, token_id, spaces_between_added=spaces_between_special_tokens)
            previous = token_id
        return data.decode("utf-8", "replace")

    def bytes_after(self, previous: int | None, token_id: int, *, spaces_between_special_tokens: bool = True) -> bytes:
        """What `token_id` adds to a text that ends with token `previous` (None: it begins the text)."""
        return self._bytes.after(previous, token_id, spaces_between_added=spaces_between_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token in the middle of a text; possibly a part of a character."""
        return self._bytes.alone(token_id)

    def token_str(self, token_id: int) -> str:
        """A token for people: its text, or `bytes:\\xf0\\x9f` where it is not whole characters."""
        data = self._bytes.alone(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        return self._id(token)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _prefix_ids(self, config: dict[str, Any]) -> tuple[int, ...]:
        """What comes before a text. `add_bos_token` of tokenizer_config.json, where there, wins over tokenizer.json
        (so did transformers 4, for which most such files were written; transformers 5 reads tokenizer.json alone)."""
        if isinstance(switch := config.get("add_bos_token"), bool):
            return (self.bos_id,) if switch and self.bos_id is not None else ()
        probe = "a"
        plain = self._backend.encode(probe, add_special_tokens=False).ids
        full = self._backend.encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()


def _json(file: Path) -> dict[str, Any]:
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{file.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file.name} is not a JSON object")
    return value


def _encode(backend: Backend, text: str) -> list[int]:
    # The batch call releases the GIL, the single one does not; "fast" leaves out offsets.
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _content(token: Any) -> str | None:
    """A token of tokenizer_config.json is a string or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _added_token(token: dict[str, Any], special: bool) -> AddedToken:
    flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    return AddedToken(token["content"], special=special, normalized=bool(token.get("normalized", not special)), **flags)


def _add_tokens(backend: Backend, config: dict[str, Any]) -> None:
    """Adds what tokenizer_config.json has beyond tokenizer.json, in the order in which transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            backend.add_tokens([_added_token(token, special=bool(token.get("special")))])
    named: list[Any] = [config.get(name) for name in NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or []
        named += extra.values() if isinstance(extra, dict) else extra
    for token in named:
        if (content := _content(token)) is not None:
            flags = token if isinstance(token, dict) else {"content": content}
            backend.add_special_tokens([_added_token(flags, special=True)])
