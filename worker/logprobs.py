"""The engine's TokenLogprobs in OpenAI's two shapes, and vLLM's for prompts.

    chat          logprobs.content = [{token, logprob, bytes, top_logprobs: [...]}, ...]
    completions   {tokens: [...], token_logprobs: [...], top_logprobs: [{token: logprob}, ...], text_offset: [...]}
    prompt        [null, {"<token id>": {logprob, rank, decoded_token}}, ...]

A token is shown by its text, one that is not whole characters as `bytes:\\xf0\\x9f`, or, on demand, as
`token_id:123`. Impossible tokens are -9999.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.messages import TokenLogprobs
from worker.protocol.responses import finite, token_logprob
from worker.tokenizer import Tokenizer


@dataclass(frozen=True)
class LogprobFormat:
    """How one request wants its logprobs. `num_top`: alternatives at each position, -1 = the whole vocabulary."""

    tokenizer: Tokenizer
    num_top: int
    as_token_ids: bool = False

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else self.tokenizer.token_str(token_id)

    def top(self, position: TokenLogprobs, num_extra: int = 0) -> list[tuple[int, float]]:
        """(id, logprob) of the top N in descending order, then of the ids asked for by name; each id once."""
        pairs = list(zip(position.token_ids, position.logprobs, strict=True))[1:]
        num_found = len(pairs) - num_extra
        num_top = num_found if self.num_top < 0 else min(self.num_top, num_found)
        chosen = pairs[:num_top] + pairs[num_found:]
        return list(dict(chosen).items())

    def chat(self, positions: Iterable[TokenLogprobs], num_extra: int = 0) -> list[dict[str, Any]]:
        """Entries of `logprobs.content`. `num_extra`: how many ids were asked for by name (logprob_token_ids)."""
        token_bytes = self.tokenizer.token_bytes
        return [
            token_logprob(
                self.name(position.token_ids[0]),
                position.logprobs[0],
                token_bytes(position.token_ids[0]),
                [(self.name(i), value, token_bytes(i)) for i, value in self.top(position, num_extra)],
            )
            for position in positions
        ]

    def prompt(self, positions: Sequence[TokenLogprobs | None], num_top: int) -> list[dict[str, Any] | None]:
        """`prompt_logprobs`: at each position the top `num_top` and the actual token."""
        return [None if position is None else self._prompt_position(position, num_top) for position in positions]

    def _prompt_position(self, position: TokenLogprobs, num_top: int) -> dict[str, Any]:
        ranked = [(position.token_ids[0], position.logprobs[0], position.rank)]
        others = zip(position.token_ids[1:], position.logprobs[1:], strict=True)
        for rank, (token_id, value) in enumerate(others, 1):
            if num_top >= 0 and rank > num_top:
                break
            if token_id != position.token_ids[0]:
                ranked.append((token_id, value, rank))
        return {
            str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": self.name(token_id)}
            for token_id, value, rank in ranked
        }


class CompletionLogprobs:
    """The completions shape of one choice, block by block; offsets go on where the last block ended."""

    def __init__(self, form: LogprobFormat) -> None:
        self._form = form
        self._offset = 0  # characters of the choice's text before the next token

    def block(
        self,
        token_ids: Sequence[int],
        positions: Sequence[TokenLogprobs | None],
        *,
        num_extra: int = 0,
        hidden: frozenset[int] = frozenset(),
    ) -> dict[str, Any]:
        """Of tokens that follow those of the last block. A position of None has no logprobs (a prompt's first).
        `num_extra`: how many ids were asked for by name; `hidden`: ids that are not part of the text."""
        form = self._form
        tokens, values, tops, offsets = [], [], [], []
        for token_id, position in zip(token_ids, positions, strict=True):
            name = form.name(token_id)
            tokens.append(name)
            values.append(None if position is None else finite(position.logprobs[0]))
            tops.append(None if position is None else self._top(name, position, num_extra))
            offsets.append(self._offset)
            if token_id not in hidden:
                self._offset += _num_chars(form.tokenizer.token_bytes(token_id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, name: str, position: TokenLogprobs, num_extra: int) -> dict[str, float]:
        """N + 1 entries where the sampled token is not among the top N: it is always there."""
        top = {self._form.name(i): finite(value) for i, value in self._form.top(position, num_extra)}
        return {**top, name: finite(position.logprobs[0])}


def joined(blocks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Several blocks of one choice as one."""
    whole: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for block in blocks:
        for key, values in block.items():
            whole[key].extend(values)
    return whole


def _num_chars(data: bytes) -> int:
    """Characters that begin in `data`: bytes that do not continue one."""
    return sum(byte & 0xC0 != 0x80 for byte in data)
