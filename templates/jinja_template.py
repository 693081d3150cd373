"""One chat template in Jinja: rendered to pieces, with the user's text kept apart from the template's control tokens.

Knows the messages' form and the template language; where the template came from is `templates.resolution`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

from templates import environment, render_state
from templates.abilities import find_abilities
from templates.call_ids import complete as complete_ids
from templates.control_tokens import ControlTokens
from templates.conversation import NOT_LAST, SYSTEM_ROLES, Abilities, Messages, adapt, broken_arguments
from templates.limits import Budget
from templates.rendered import Options, Piece, TemplateError
from templates.shield import Shield
from templates.written_calls import fold, one_by_one

# What the renderer itself passes or offers: no chat_template_kwargs may take its place.
RESERVED_KWARGS = (
    frozenset(
        "messages tools documents functions add_generation_prompt continue_final_message chat_template tokenize "
        "conversation return_dict return_tensors padding truncation max_length self bos_token eos_token unk_token "
        "sep_token pad_token cls_token mask_token".split()
    )
    | environment.GLOBAL_NAMES
)
# Templates that care about continuing look for exactly this text, which transformers appends to the last message.
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class JinjaTemplate:
    """Compiled on creation: raises TemplateError if the source is no valid template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], control_tokens: Collection[str]) -> None:
        """`special_tokens`: bos_token ... by name; `control_tokens`: the texts of all added tokens."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._program = environment.compile_template(source)
        self.variables = self._program.variables
        self._control = ControlTokens(
            control_tokens, self._program.constants, self._program.words, [CONTINUE_TAG.strip()], source
        )

    @cached_property
    def abilities(self) -> Abilities:
        return find_abilities(self.source, self._program, lambda messages, tools: self._render(messages, tools=tools))

    def ignored(self, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """The kwargs that the template does not read."""
        return tuple(sorted(kwargs.keys() - self.variables - ({"now"} if self._tells_time else set())))

    @cached_property
    def _tells_time(self) -> bool:
        return bool({"strftime_now", "datetime"} & self.variables) or "strftime_now" in self.source

    def render(self, messages: Messages, options: Options) -> tuple[Piece, ...]:
        """Raises TemplateError, with the template's own words where it refuses the messages."""
        kwargs = dict(options.kwargs)
        now = _moment(kwargs.pop("now", None)) if self._tells_time and "now" not in self.variables else None
        adapted = self._adapted(messages, bool(options.tools))
        values: dict[str, Any] = {
            "tools": [] if options.tools is None and self.abilities.needs_tools else options.tools,
            "documents": options.documents,
            **{name: value for name, value in kwargs.items() if name in self.variables},
        }
        shield = Shield(self._control, [adapted, values])
        if not options.allow_control_tokens:
            adapted = [shield.mask_message(message, mixed=options.mixed_turns) for message in adapted]
            values = {name: shield.mask(value) for name, value in values.items()}
        adapted = [self._shown(message, options) for message in adapted]
        if options.continue_final_message:
            if messages[-1].get("role") in SYSTEM_ROLES and adapted[-1].get("role") not in SYSTEM_ROLES:
                raise TemplateError(NOT_LAST)
            adapted[-1] = _tagged(adapted[-1])
        try:
            with render_state.clock(now), render_state.veiled(shield):
                text = self._render(adapted, add_generation_prompt=options.add_generation_prompt, **values)
        except TemplateError as error:
            words = shield.reveal(str(error))
            if path := broken_arguments(messages):
                words = f"{path} is no JSON object, which this chat template needs: {words}"
            raise TemplateError(words) from None
        return shield.split(_cut_at_tag(text) if options.continue_final_message else text)

    def _adapted(self, messages: Messages, tools: bool) -> Messages:
        """A copy of the messages as the template takes them, but for calls that it does not write."""
        if not self.abilities.many_calls:
            messages = one_by_one(messages)
        return adapt(complete_ids(messages, self.abilities.ids), self.abilities, tools)

    def _shown(self, message: dict[str, Any], options: Options) -> dict[str, Any]:
        """Calls that the template does not write are text. (What the user wrote is masked by now, the marks around
        calls are not.)"""
        if not self.abilities.hides_calls(message, bool(options.tools)):
            return message
        return fold(message, options.write_calls, as_parts="assistant" in self.abilities.only_parts_roles)

    def _render(self, messages: Messages, tools: Any = None, documents: Any = None, **values: Any) -> str:
        values = {
            **self._special_tokens,
            "add_generation_prompt": False,
            **values,
            "messages": messages,
            "tools": tools,
            "documents": documents,
        }
        if "functions" in self.variables:  # the older name, for the tools as JSON text
            functions = [tool.get("function", tool) for tool in tools or ()]
            values = {"functions": json.dumps(functions, indent=4, ensure_ascii=False), "datetime": _today(), **values}
        return environment.render(self._program.template, values, Budget(_size(values)))


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises TemplateError for names that are the renderer's own."""
    for name in kwargs:
        if name in RESERVED_KWARGS:
            param = f"chat_template_kwargs.{name}"
            raise TemplateError(f"{param} is not allowed: the name is reserved", param)


def _today() -> str:
    return render_state.now().strftime("%Y-%m-%d")


def _tagged(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + CONTINUE_TAG}
    if isinstance(content, list) and content:
        last = {**content[-1], "text": content[-1]["text"] + CONTINUE_TAG}
        return {**message, "content": [*content[:-1], last]}
    raise TemplateError("continue_final_message: the last message has no content to continue")


def _cut_at_tag(text: str) -> str:
    """What comes before the end of the last message. A template that trims contents gets it without trailing blanks,
    as every earlier turn."""
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0:
        raise TemplateError("continue_final_message: this chat template does not show the last message as it is")
    return text[:at] if text.startswith(CONTINUE_TAG, at) else text[:at].rstrip()


def _moment(value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        param = "chat_template_kwargs.now"
        raise TemplateError(f"{param} must be a date such as 2025-01-31", param) from None


def _size(value: Any) -> int:
    """Characters in the strings of a request."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return 8
