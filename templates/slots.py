"""Built-in chat formats: lists of slots, rendered straight to pieces.

A format is data (`builtin.toml`): one string a slot, in which ⟦...⟧ is a control token by its name (⟦bos⟧ and ⟦eos⟧
are the tokenizer's own) and {content}, {system} and {round} are filled in. Nothing is parsed afterwards, so a control
token is one token even where the tokenizer would split its text, and what a user writes is never anything but text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from templates.conversation import Messages
from templates.rendered import Piece, TemplateError
from templates.shield import ControlTokens

_PART = re.compile(r"⟦(?P<token>.*?)⟧|\{(?P<field>content|system|round)\}", re.DOTALL)
SLOTS = ("prefix", "system", "user", "generation", "assistant", "tool", "nothink")


@dataclass(frozen=True)
class SlotTemplate:
    """One format. Field by field as in builtin.toml; `parts` is made from the slots' strings."""

    name: str
    prefix: str = ""  # before everything
    system: str = ""  # a system message; where `user` has {system}, what is put there instead of a turn of its own
    user: str = ""
    generation: str = ""  # what begins an assistant turn
    assistant: str = ""  # the rest of an assistant turn
    tool: str = ""  # a tool's result; as a user's message where empty
    nothink: str = ""  # follows `generation` where enable_thinking is false
    default_system: str = ""  # used where a chat brings no system message
    stop: tuple[str, ...] = ()  # beside eos: control tokens, or texts
    apart: bool = False  # contents are encoded apart from the text around them
    thinks: bool = False  # reasoning is taken out of earlier assistant turns
    aliases: tuple[str, ...] = ()  # other names of the format
    model_types: tuple[str, ...] = ()  # of config.json, lower case
    hints: tuple[str, ...] = ()  # parts of names of models that use it and say so nowhere else

    @property
    def control_tokens(self) -> frozenset[str]:
        """Every control token that it writes, bos and eos aside."""
        text = "".join(getattr(self, slot) for slot in SLOTS)
        return frozenset(match["token"] for match in _PART.finditer(text) if match["token"]) - {"bos", "eos"}

    def render(
        self,
        messages: Messages,
        special_tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        enable_thinking: bool = True,
    ) -> tuple[Piece, ...]:
        """`messages`: roles system, user, assistant, tool; contents are text."""
        writer = _Writer(special_tokens, self.apart)
        writer.write(self.prefix)
        held = self._render_system(writer, messages)
        rounds = 0
        for index, message in enumerate(messages):
            role, content = message["role"], message.get("content") or ""
            last = continue_final_message and index == len(messages) - 1
            if role == "system":
                continue
            if role == "assistant":
                writer.write(self.generation)
                content = content if last or not self.thinks else content.rpartition("</think>")[2].lstrip("\n")
                writer.write(self.assistant, content=content, until_content=last)
                continue
            rounds += role == "user"
            slot = self.tool if role == "tool" and self.tool else self.user
            writer.write(slot, content=content, system=held, round=str(rounds), until_content=last)
            held = ()
        if held:  # no user's turn to put the system text into
            writer.extend(held)
        if add_generation_prompt and not continue_final_message:
            writer.write(self.generation)
            if not enable_thinking:
                writer.write(self.nothink)
        return writer.pieces()

    def _render_system(self, writer: _Writer, messages: Messages) -> tuple[Piece, ...]:
        """Writes the system messages as one turn, or gives back what goes into the first user's turn."""
        texts = [message.get("content") or "" for message in messages if message["role"] == "system"]
        text = "\n\n".join(filter(None, texts)) if texts else self.default_system
        if not text:
            return ()
        if "{system}" not in self.user:
            writer.write(self.system, content=text)
            return ()
        held = _Writer(writer.special_tokens, self.apart)
        held.write(self.system or "{content}\n\n", content=text)
        return held.pieces()


class _Writer:
    """Collects pieces; text is put together unless contents stay apart."""

    def __init__(self, special_tokens: Mapping[str, str], apart: bool) -> None:
        self.special_tokens = special_tokens
        self._apart = apart
        self._pieces: list[Piece] = []

    def write(
        self,
        slot: str,
        content: str = "",
        system: tuple[Piece, ...] = (),
        round: str = "",
        until_content: bool = False,
    ) -> None:
        position = 0
        for match in _PART.finditer(slot):
            self._text(slot[position : match.start()])
            position = match.end()
            if match["token"]:
                self._token(match["token"])
            elif match["field"] == "content":
                self._text(content, own=True)
                if until_content:
                    return
            elif match["field"] == "system":
                self.extend(system)
            else:
                self._text(round)
        self._text(slot[position:])

    def extend(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            if piece.control:
                self._pieces.append(piece)
            else:
                self._text(piece.text, own=True)

    def _token(self, name: str) -> None:
        text = self.special_tokens.get(f"{name}_token", "") if name in ("bos", "eos") else name
        if text:
            self._pieces.append(Piece(text, control=True))

    def _text(self, text: str, own: bool = False) -> None:
        """`own`: a content, which stays a piece of its own where contents are encoded apart."""
        if not text:
            return
        if self._pieces and not self._pieces[-1].control and not self._apart:
            text = self._pieces.pop().text + text
        self._pieces.append(Piece(text, control=False))

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(self._pieces)


def plain_messages(messages: Messages) -> Messages:
    """Messages as slots take them: known roles, contents as text."""
    plain = []
    for message in messages:
        role = {"developer": "system", "function": "tool", "ipython": "tool"}.get(message["role"], message["role"])
        if role not in ("system", "user", "assistant", "tool"):
            raise TemplateError(f"this chat format has no role {role!r}")
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
        plain.append({**message, "role": role, "content": content or ""})
    return plain


def parse_control_tokens(pieces: tuple[Piece, ...], control: ControlTokens) -> tuple[Piece, ...]:
    """The pieces with control tokens that texts spell made control pieces (for callers who ask for that)."""
    parsed: list[Piece] = []
    for piece in pieces:
        position = 0
        for start, end in () if piece.control else control.find(piece.text):
            parsed += [Piece(piece.text[position:start], False), Piece(piece.text[start:end], True)]
            position = end
        parsed.append(Piece(piece.text[position:], piece.control))
    return tuple(piece for piece in parsed if piece.text)
