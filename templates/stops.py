"""What ends an assistant's turn, found by rendering a turn and looking at what the template writes behind it.

Knows pieces only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from templates.conversation import Messages
from templates.rendered import Piece, Stop, TemplateError

ANSWER = "Antwortprobe"  # a word that no template contains


# A marker that is no token of this tokenizer: the model writes it letter by letter, so it stops by its text.
_MARKER = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


def find_stop(
    render: Callable[[Messages], tuple[Piece, ...]],
    declared: Collection[str],
    is_token: Callable[[str], bool],
) -> Stop:
    """`declared`: stop words that the format names; where it names none, a turn is rendered to find one. A word that
    is one token of the vocabulary stops by its id."""
    all_words = dict.fromkeys(declared) or dict.fromkeys(filter(None, [_end_of_turn(render)]))
    return Stop(
        tokens=tuple(word for word in all_words if is_token(word)),
        words=tuple(word for word in all_words if not is_token(word)),
    )


def _end_of_turn(render: Callable[[Messages], tuple[Piece, ...]]) -> str | None:
    """What the template writes right behind an assistant's last turn; where that is nothing (the next turn's header
    ends this one), what it writes behind an earlier turn."""
    user: dict[str, Any] = {"role": "user", "content": "Hello"}
    assistant: dict[str, Any] = {"role": "assistant", "content": ANSWER}
    conversations: list[Messages] = [[user, assistant], [user, assistant, user]]
    for messages in conversations:
        try:
            pieces = render(messages)
        except TemplateError:
            continue
        if found := _behind_answer(pieces):
            return found
    return None


def _behind_answer(pieces: tuple[Piece, ...]) -> str | None:
    """The control token or marker behind the answer, if only blanks are between."""
    for index in range(len(pieces) - 1, -1, -1):
        piece = pieces[index]
        if piece.control or ANSWER not in piece.text:
            continue
        behind = piece.text.rpartition(ANSWER)[2].strip()
        if behind:
            marker = _MARKER.match(behind)
            return marker[0] if marker else None
        return pieces[index + 1].text if index + 1 < len(pieces) else None
    return None
