"""Built-in chat formats: lists of slots, rendered straight to pieces.

A format is data (`builtin.toml`): one string a slot, in which ⟦...⟧ is a control token by its name (⟦bos⟧ and ⟦eos⟧
are the tokenizer's own) and {content}, {system} and {round} are filled in. Nothing is parsed afterwards, so a control
token is one token even where the tokenizer would split its text, and what a user writes is never anything but text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from templates.control_tokens import ControlTokens
from templates.conversation import NOT_LAST, Messages
from templates.rendered import Options, Piece, TemplateError

_PART = re.compile(r"⟦(?P<token>.*?)⟧|\{(?P<field>content|system|round0?|tools|name|arguments)\}", re.DOTALL)
SLOTS = ("prefix", "system", "user", "generation", "assistant", "tool", "tools", "call", "nothink")
_SPECIAL = {"bos": "bos_token", "bos?": "bos_token", "eos": "eos_token"}


@dataclass(frozen=True)
class SlotTemplate:
    """One format. Field by field as in builtin.toml."""

    name: str
    prefix: str = ""  # before everything
    system: str = ""  # a system message; where `user` has {system}, what is put there instead of a turn of its own
    user: str = ""
    generation: str = ""  # what begins an assistant turn
    assistant: str = ""  # the rest of an assistant turn
    tool: str = ""  # a tool's result; as a user's message where empty
    tools: str = ""  # the tools of a request, behind the system text
    call: str = ""  # a tool call, behind the assistant's text
    nothink: str = ""  # follows `generation` where enable_thinking is false
    default_system: str = ""  # used where a chat brings no system message
    stop: tuple[str, ...] = ()  # beside eos: control tokens, or texts
    apart: bool = False  # contents are encoded apart from the text around them
    thinks: bool = False  # reasoning is taken out of earlier assistant turns
    aliases: tuple[str, ...] = ()  # other names of the format
    model_types: tuple[str, ...] = ()  # of config.json, lower case
    vocab_sizes: tuple[int, ...] = ()  # of the models of that type that use this format
    needs: tuple[str, ...] = ()  # tokens that such a model has
    hints: tuple[str, ...] = ()  # parts of names of models that use it and say so nowhere else

    @property
    def text(self) -> str:
        """All that it writes, for who looks for markers."""
        return "\n".join(filter(None, (getattr(self, slot) for slot in SLOTS))).replace("⟦", "").replace("⟧", "")

    @property
    def knows_tools(self) -> bool:
        return bool(self.tools and self.call)

    @property
    def control_tokens(self) -> frozenset[str]:
        """Every control token that it writes, bos and eos aside."""
        text = "".join(getattr(self, slot) for slot in SLOTS)
        return frozenset(match["token"] for match in _PART.finditer(text) if match["token"]) - _SPECIAL.keys()

    def render(
        self,
        messages: Messages,
        special_tokens: Mapping[str, str],
        options: Options = Options(),  # noqa: B008 (frozen)
        *,
        adds_bos: bool = False,
    ) -> tuple[Piece, ...]:
        """`messages`: roles system, user, assistant, tool; contents are text. `adds_bos`: the tokenizer puts bos
        before every text."""
        if options.continue_final_message and messages[-1]["role"] == "system":
            raise TemplateError(NOT_LAST)
        writer = _Writer(special_tokens, adds_bos, self.apart)
        writer.write(self.prefix)
        held = self._write_system(writer, messages, options.tools)
        rounds = 0
        for index, message in enumerate(messages):
            role, content = message["role"], message.get("content") or ""
            last = options.continue_final_message and index == len(messages) - 1
            if role == "system":
                continue
            if role == "assistant":
                writer.write(self.generation)
                content = (
                    content
                    if last or options.mixed_turns or not self.thinks
                    else content.rpartition("</think>")[2].lstrip("\n")
                )
                writer.write(self.assistant, content=[*writer.text(content), *self._calls(writer, message)], cut=last)
                continue
            rounds += role == "user"
            slot = self.tool if role == "tool" and self.tool else self.user
            fields = {"round": str(rounds), "round0": str(rounds - 1)}
            writer.write(slot, content=writer.text(content), system=held, fields=fields, cut=last)
            held = []
        writer.extend(held)  # where there was no user's turn to put the system text into
        if options.add_generation_prompt:
            writer.write(self.generation)
            if options.kwargs.get("enable_thinking") is False:
                writer.write(self.nothink)
        return tuple(writer.pieces)

    def _write_system(self, writer: _Writer, messages: Messages, tools: list[dict[str, Any]] | None) -> list[Piece]:
        """Writes the system messages as one turn, or gives back what goes into the first user's turn."""
        texts = [message.get("content") or "" for message in messages if message["role"] == "system"]
        text = "\n\n".join(filter(None, texts)) if texts else self.default_system
        content = writer.text(text)
        if tools and self.knows_tools:
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            behind = writer.made(self.tools if text else self.tools.lstrip("\n"), fields={"tools": listed})
            content = [*content, *behind]
        if not content:
            return []
        if "{system}" not in self.user:
            writer.write(self.system, content=content)
            return []
        return writer.made(self.system or "{content}\n\n", content=content)

    def _calls(self, writer: _Writer, message: Mapping[str, Any]) -> list[Piece]:
        pieces: list[Piece] = []
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            arguments = function.get("arguments")
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments or {}, ensure_ascii=False)
            fields = {"name": json.dumps(function["name"], ensure_ascii=False), "arguments": arguments}
            pieces += writer.text("\n" if index or message.get("content") else "")
            pieces += writer.made(self.call, fields=fields)
        return pieces


class _Writer:
    """Collects pieces. Neighbouring texts become one piece, unless contents are to stay apart."""

    def __init__(self, special_tokens: Mapping[str, str], adds_bos: bool, apart: bool) -> None:
        self._special_tokens = special_tokens
        self._adds_bos = adds_bos
        self._apart = apart
        self.pieces: list[Piece] = []

    def text(self, text: str) -> list[Piece]:
        return [Piece(text, control=False)] if text else []

    def made(self, slot: str, **values: Any) -> list[Piece]:
        """The pieces of a slot, not written yet."""
        other = _Writer(self._special_tokens, self._adds_bos, self._apart)
        other.write(slot, **values)
        return other.pieces

    def write(
        self,
        slot: str,
        content: Sequence[Piece] = (),
        system: Sequence[Piece] = (),
        fields: Mapping[str, str] | None = None,
        cut: bool = False,
    ) -> None:
        """`cut`: nothing behind the content."""
        position = 0
        for match in _PART.finditer(slot):
            self.extend(self.text(slot[position : match.start()]))
            position = match.end()
            if match["token"]:
                self.extend(self._token(match["token"]))
            elif match["field"] == "content":
                self.extend(content)
                if cut:
                    return
            elif match["field"] == "system":
                self.extend(system)
            else:
                self.extend(self.text((fields or {}).get(match["field"], match[0])))
        self.extend(self.text(slot[position:]))

    def extend(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            last = self.pieces[-1] if self.pieces else None
            if last and not last.control and not piece.control and not self._apart:
                self.pieces[-1] = Piece(last.text + piece.text, control=False)
            else:
                self.pieces.append(piece)

    def _token(self, name: str) -> list[Piece]:
        if name == "bos?" and not self._adds_bos:
            return []
        text = self._special_tokens.get(_SPECIAL[name], "") if name in _SPECIAL else name
        return [Piece(text, control=True)] if text else []


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
