"""What rendering a chat gives back. Knows nothing of templates, models or tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class TemplateError(ValueError):
    """A chat cannot be rendered, or a template cannot be used. The message is for the client (or the operator)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param`: what is to blame, if that is not the messages."""
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt. A control piece is one token of the template; any other is text, whatever it spells.

    Text pieces that follow each other directly are encoded apart, as some formats ask; between a text piece and a
    control piece that is an added token nothing is cut.
    """

    text: str
    control: bool


# Each a name and its arguments: an object, or text that is none.
Calls = Sequence[tuple[str, Any]]
CallWriter = Callable[[Calls], str]  # -> their text


def calls_as_json(calls: Calls) -> str:
    """The form of calls that most models know."""
    objects = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


@dataclass(frozen=True, slots=True)
class Options:
    """How a chat is rendered."""

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables for the template
    allow_control_tokens: bool = False  # control tokens that texts spell become control tokens
    write_calls: CallWriter = calls_as_json  # where the template passes over calls
    mixed_turns: bool = False  # assistant turns hold what tools said: nothing is looked for in them


@dataclass(frozen=True, slots=True)
class Stop:
    """What ends an assistant's turn beside the tokenizer's and the generation config's eos."""

    tokens: tuple[str, ...] = ()  # control tokens: stop at their id
    words: tuple[str, ...] = ()  # texts that are no single token: stop strings


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt."""

    text: str
    pieces: tuple[Piece, ...]
    source: str  # which template it came from, and by which rule
    stop_words: tuple[str, ...] = ()  # further stop strings of this prompt alone
    react: bool = False  # the prompt asks for tool calls in the ReAct form
    ignored_kwargs: tuple[str, ...] = ()  # chat_template_kwargs that the template does not read


def pieces_text(pieces: tuple[Piece, ...] | list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)
