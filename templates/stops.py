"""What ends an assistant's turn, found by rendering a turn and looking at what the template writes behind it.

Knows pieces only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from templates.conversation import Messages
from templates.rendered import Piece, Stop, TemplateError
from templates.shield import ControlTokens

ANSWER = "Antwortprobe"  # a word that no template contains


def find_stop(
    render: Callable[..., tuple[Piece, ...]],
    control: ControlTokens,
    declared: Collection[str],
    vocabulary: Collection[str],
) -> Stop:
    """`declared`: stop words that the format names. A word that is one token of the vocabulary stops by its id."""
    tokens = [word for word in declared if word in vocabulary]
    words = [word for word in declared if word not in vocabulary]
    if (token := _end_of_turn(render)) is not None:
        tokens.append(token)
    return Stop(tuple(dict.fromkeys(tokens)), tuple(words))


def _end_of_turn(render: Callable[..., tuple[Piece, ...]]) -> str | None:
    """The control token right behind an assistant's last turn; where nothing is written there (the next turn's header
    ends this one), the one behind an earlier turn."""
    user: dict[str, Any] = {"role": "user", "content": "Hello"}
    assistant: dict[str, Any] = {"role": "assistant", "content": ANSWER}
    conversations: list[Messages] = [[user, assistant], [user, assistant, user]]
    for messages in conversations:
        try:
            pieces = render(messages, add_generation_prompt=False)
        except TemplateError:
            continue
        if (token := _control_after(pieces)) is not None:
            return token
    return None


def _control_after(pieces: tuple[Piece, ...]) -> str | None:
    """The first control token behind the answer, if only blanks are between."""
    for index in range(len(pieces) - 1, -1, -1):
        piece = pieces[index]
        if piece.control or ANSWER not in piece.text:
            continue
        behind = piece.text.rpartition(ANSWER)[2]
        if behind.strip() or index + 1 == len(pieces):
            return None
        return pieces[index + 1].text
    return None
