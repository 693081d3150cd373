"""Reasoning before the answer: <think>...</think> and its kin.

The block counts as one only at the beginning of the output: where the prompt opened it, or where the output itself
begins with the opening. An opening anywhere later is text. New lines next to the tags belong to the format.

A call inside the block is talk about calls, unless the block is never closed and ends with the call: some models call
without closing their thoughts. So from the beginning of a call on the block is held until that is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker.parsers.base import Content, Delta, Parser, Reasoning, ToolCallStart, Trail
from worker.parsers.source import Machine, Steps


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks its reasoning."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always: bool = False  # the output begins inside, even where neither the prompt nor the output opens it
    around: tuple[str, ...] = ()  # markers around the answer itself, dropped

    @property
    def markers(self) -> frozenset[str]:
        """Texts that must reach the parser where they are special tokens."""
        return frozenset(tag.strip() for tag in (*self.opens, *self.closes, *self.around))

    def opened_by(self, prompt: str, prefill: str = "") -> bool:
        """Whether an output behind `prompt` begins inside the block. `prefill`: the end of the prompt that is a begun
        answer of the model, where the block may have been opened and closed."""
        opened = max((prefill.rfind(tag) for tag in self.opens), default=-1)
        closed = max((prefill.rfind(tag) for tag in self.closes), default=-1)
        if opened >= 0 or closed >= 0:
            return opened > closed
        prompt = prompt.rstrip()
        if any(prompt.endswith(tag.strip()) for tag in self.closes):
            return False
        return self.always or any(prompt.endswith(tag.strip()) for tag in self.opens)


THINK = Tags(("<think>",), ("</think>",))
FAMILIES = {
    "think": THINK,
    "think_always": Tags(("<think>",), ("</think>",), always=True),
    "mistral": Tags(("[THINK]",), ("[/THINK]",)),
    "seed_oss": Tags(("<seed:think>",), ("</seed:think>",)),
    "gemma4": Tags(("<|channel>thought\n", "<|channel>thought"), ("<channel|>",)),
    "cohere": Tags(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "kimi": Tags(("◁think▷",), ("◁/think▷",)),
    "apertus": Tags(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "granite": Tags(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "response": Tags(("<think>",), ("</think>",), around=("<response>", "</response>")),
}


class ReasoningParser(Machine):
    """Splits an output into Reasoning and Content."""

    def __init__(
        self,
        tags: Tags,
        *,
        inside: bool,
        tool_starts: tuple[str, ...] = (),
        trial: Callable[[], Parser] | None = None,
    ) -> None:
        """`inside`: see Tags.opened_by. `tool_starts` begin a call, `trial` makes a parser that can tell."""
        super().__init__()
        self.markers = tags.markers
        self._tags = tags
        self._inside = inside
        self._tool_starts = tool_starts if trial else ()
        self._trial = trial
        self._space = Trail()  # at the end of the thoughts so far
        self._thought = False  # something was emitted
        self._closed_ahead = False  # the end of the block was seen: no call in it is one

    def run(self) -> Steps[None]:
        tags = self._tags
        self.source.mark()
        yield from self.source.space()
        opening = yield from self.source.one_of(tags.opens)
        if opening is None and not self._inside:
            # A model whose thinking is off may still close the block.
            if (yield from self.source.one_of(tags.closes)) is None:
                self.source.rewind()
                yield from self._answer()
                return
            self.source.forget()
        else:
            if opening is None:
                self.source.rewind()
            else:
                self.source.forget()
            if not (yield from self._thoughts()):
                return
            self.answering = True
        yield from self.source.space()
        yield from self._answer()

    def _answer(self) -> Steps[None]:
        """Everything to the end, without the markers around it."""
        while (yield from self.source.until(self._tags.around, self._say)) is not None:
            pass

    def _say(self, text: str) -> None:
        if text:
            self.emit(Content(text))

    def _think(self, text: str) -> None:
        if said := self._space.add(text):
            self.emit(Reasoning(said if self._thought else said.lstrip()))
            self._thought = True

    def _thoughts(self) -> Steps[bool]:
        """-> whether the block was closed."""
        closes = self._tags.closes
        while True:
            starts = () if self._closed_ahead or self.source.exhausted else self._tool_starts
            mark = yield from self.source.until(closes + starts, self._think)
            if mark in closes:
                return True
            if mark is None:
                if self._thought and (space := self._space.take()):
                    self.emit(Reasoning(space))
                return False
            if (yield from self._call(mark)):
                return False
            self._think(mark)

    def _call(self, start: str) -> Steps[bool]:
        """Whether the output from `start` to its end is calls and nothing else; if so, it is emitted as Content."""
        assert self._trial is not None
        trial = self._trial()
        held: list[str] = []
        called = False

        def consider(deltas: list[Delta]) -> None:
            nonlocal called
            called = called or any(isinstance(delta, ToolCallStart) for delta in deltas)
            if any(isinstance(delta, Content) and delta.text.strip() for delta in deltas):
                raise _JustTalk

        def hold(text: str) -> None:
            held.append(text)
            consider(trial.feed(text))

        self.source.mark()
        try:
            hold(start)
            closed = yield from self.source.until(self._tags.closes, hold)
            if closed is None:
                consider(trial.close())
            self._closed_ahead = closed is not None
        except _JustTalk:
            closed = ""
        if closed is not None or not called:
            self.source.rewind()
            return False
        self.source.forget()
        self._say("".join(held))
        return True


class _JustTalk(Exception):
    """Text follows the call: it was none."""
