"""Which chat template a model gets, by rules in this order:

1. the operator's word: MODEL_TEMPLATE_TYPE (a built-in format) or CUSTOM_CHAT_TEMPLATE (a template or a path)
2. the tokenizer's own template, where it can express the request
3. ReAct, for requests with tools that the template of rule 1, 2, 4 or 5 cannot express
4. a built-in format, by the model's name or type
5. ChatML

`load` decides once; `ChatTemplates.render` follows the decision, request by request. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from templates import index, model_files, react
from templates.control_tokens import ControlTokens
from templates.conversation import Messages
from templates.jinja_template import JinjaTemplate, check_kwargs
from templates.model_files import ModelFiles
from templates.rendered import (
    CallWriter,
    Options,
    Piece,
    Rendered,
    Stop,
    TemplateError,
    calls_as_json,
    pieces_text,
)
from templates.slots import SlotTemplate, parse_control_tokens, plain_messages
from templates.stops import find_stop

_MARKER = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>")


def load(
    model_dir: Path,
    *,
    template_type: str | None = None,
    custom_template: str | None = None,
    tokenizer: model_files.Vocabulary | None = None,
) -> ChatTemplates:
    """`tokenizer`: the model's, if it is loaded already; else its tokens are read from the folder's files.

    Raises TemplateError if a template that was asked for does not exist or is not valid."""
    files = model_files.read(model_dir, tokenizer)
    if template_type:
        if (built_in := index.by_name(template_type)) is None:
            raise TemplateError(
                f"MODEL_TEMPLATE_TYPE={template_type!r} is not known. Known are: {', '.join(index.known_names())}"
            )
        return ChatTemplates(files, built_in, why=f"{built_in.name}: MODEL_TEMPLATE_TYPE is {template_type!r}")
    if custom_template:
        source = custom_source(custom_template)
        return ChatTemplates(files, {"default": source}, why="custom template: CUSTOM_CHAT_TEMPLATE is set")
    own = files.templates
    found = index.for_model(files)
    if own:
        if found and (split := _split_tokens(found[0], own, files)):
            why = f"{found[0].name}: {found[1]}, and the tokenizer would split {', '.join(split)} in its own template"
            return ChatTemplates(files, found[0], why=why)
        return ChatTemplates(files, own, why=f"the tokenizer's own template ({files.template_file})")
    if found:
        return ChatTemplates(files, found[0], why=f"{found[0].name}: no template of its own; {found[1]}")
    fallback = index.formats()[index.FALLBACK]
    why = f"{fallback.name}: no template of its own, and no built-in format for model type {files.model_type!r}"
    return ChatTemplates(files, fallback, why=why)


class ChatTemplates:
    """The chat template of one model. Thread-safe; rendering takes milliseconds, for long chats longer."""

    def __init__(self, files: ModelFiles, base: SlotTemplate | Mapping[str, str], why: str) -> None:
        self.why = why
        self._files = files
        self._slots = base if isinstance(base, SlotTemplate) else None
        self._control = ControlTokens(files.added_tokens)
        self._jinja: dict[str, JinjaTemplate] = {}
        if not isinstance(base, SlotTemplate):
            self._jinja = {
                name: JinjaTemplate(source, files.special_tokens, files.added_tokens | _markers(source, files))
                for name, source in base.items()
            }

    @property
    def text(self) -> str:
        """The template's source, or all that a built-in format writes: for who looks for markers in it."""
        return self._slots.text if self._slots else "\n".join(template.source for template in self._jinja.values())

    @cached_property
    def stop(self) -> Stop:
        """What ends an assistant's turn by this template, beside the eos tokens of the model's files."""
        whole = Options(add_generation_prompt=False)
        declared = self._slots.stop if self._slots else ()
        return find_stop(lambda messages: self._pieces(messages, whole), declared, self._files.is_token)

    def replaced(self, template: str) -> ChatTemplates:
        """The same model with another template: the name of one of its own, or a template's text."""
        source = self._files.templates.get(template) or custom_source(template, paths=False)
        try:
            return ChatTemplates(self._files, {"default": source}, why="the request's own chat_template")
        except TemplateError as error:
            raise TemplateError(str(error), "chat_template") from None

    def render(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        allow_control_tokens: bool = False,
        write_calls: CallWriter = calls_as_json,
    ) -> Rendered:
        """`write_calls`: how an assistant's calls are written where the template passes over them. Raises
        TemplateError, with the template's own words where it refuses the messages."""
        given = {name: value for name, value in (kwargs or {}).items() if value is not None}
        options = Options(
            tools, documents, add_generation_prompt, continue_final_message, given, allow_control_tokens, write_calls
        )
        try:
            return self._rendered(messages, options)
        except RecursionError:
            raise TemplateError("the request is nested too deeply") from None

    def _rendered(self, messages: Messages, options: Options) -> Rendered:
        if not messages:
            raise TemplateError("messages must not be empty")
        if options.continue_final_message and options.add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        check_kwargs(options.kwargs)
        template = self._pick(bool(options.tools))
        uses_react = self._needs_react(messages, bool(options.tools), template)
        if uses_react:
            messages, goes_on = react.rewrite(plain_messages(messages), options.tools)
            options = replace(options, tools=None, mixed_turns=True)
            if goes_on:
                options = replace(options, add_generation_prompt=False, continue_final_message=True)
        pieces = self._pieces(messages, options)
        given = options.kwargs
        return Rendered(
            text=pieces_text(pieces),
            pieces=pieces,
            source=f"ReAct over {self.why}" if uses_react else self.why,
            stop_words=(react.STOP_WORD,) if uses_react else (),
            react=uses_react,
            ignored_kwargs=template.ignored(given) if template else tuple(sorted(given.keys() - {"enable_thinking"})),
        )

    def _needs_react(self, messages: Messages, tools: bool, template: JinjaTemplate | None) -> bool:
        if template is not None:
            knows_tools, writes_turns = template.abilities.tools, template.abilities.tool_turns
        else:
            assert self._slots is not None
            knows_tools, writes_turns = self._slots.knows_tools, False
        return not knows_tools and (tools or (not writes_turns and react.has_tool_turns(messages)))

    def _pick(self, tools: bool) -> JinjaTemplate | None:
        """The named template for a request; None where the format is a built-in one."""
        if self._slots:
            return None
        names = ("tool_use", "default") if tools else ("default",)
        return next((self._jinja[name] for name in names if name in self._jinja), next(iter(self._jinja.values())))

    def _pieces(self, messages: Messages, options: Options) -> tuple[Piece, ...]:
        if template := self._pick(bool(options.tools)):
            return template.render(messages, options)
        assert self._slots is not None
        files = self._files
        pieces = self._slots.render(plain_messages(messages), files.special_tokens, options, adds_bos=files.adds_bos)
        return parse_control_tokens(pieces, self._control) if options.allow_control_tokens else pieces


def custom_source(value: str, *, paths: bool = True) -> str:
    """A template given as its text, as its text on one line with escaped newlines, or as a path to a file."""
    if "{" not in value and "\n" not in value:
        file = Path(os.path.expanduser(value))
        if paths and os.path.isfile(file):  # false, too, for what can be no path
            return _template_file(file)
        raise TemplateError(
            f"CUSTOM_CHAT_TEMPLATE={value!r:.200} is neither a template nor an existing file"
            if paths
            else "chat_template is not a template: it has no {{ }} or {% %}"
        )
    if "\n" not in value and re.search(r"\\n", re.sub(r"\{[{%#].*?[#%}]\}", "", value)):
        escapes = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
        return re.sub(r'\\([ntr"\\])', lambda match: escapes[match[1]], value)
    return value


def _template_file(file: Path) -> str:
    try:
        source = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"CUSTOM_CHAT_TEMPLATE={file}: cannot be read: {error}") from None
    if "{{" not in source and "{%" not in source:
        raise TemplateError(f"CUSTOM_CHAT_TEMPLATE={file} is no chat template: it has no {{{{ }}}} or {{% %}}")
    return source


def _markers(source: str, files: ModelFiles) -> set[str]:
    """Markers that a template writes and that are tokens, though the tokenizer would split their text."""
    return {marker for marker in _MARKER.findall(source) if files.is_token(marker)}


def _split_tokens(built_in: SlotTemplate, own: Mapping[str, str], files: ModelFiles) -> list[str]:
    """Control tokens that the tokenizer's own template writes and that the tokenizer would cut into several."""
    source = "\n".join(own.values())
    missing = built_in.control_tokens - files.added_tokens
    return sorted(token for token in missing if token in source and files.is_token(token))
