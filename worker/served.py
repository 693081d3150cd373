"""The model that is served, as the text side knows it: names, tokenizer, templates, limits, defaults, stop set."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import templates
from engine.grammar import GrammarCompiler
from engine.messages import EngineInfo
from templates import ChatTemplates, Stop, TemplateError, check_kwargs
from worker import VERSION, sampling
from worker.control_tokens import TokenizerError
from worker.errors import ModelNotFound, SettingsError
from worker.model_files import ModelFiles
from worker.parsers import registry
from worker.parsers.registry import Formats, UnknownFormat
from worker.prompts import Prompt, PromptBuilder
from worker.protocol.requests import ChatCompletionRequest
from worker.protocol.validation import fail, quote
from worker.settings import Settings, public_name
from worker.structured import OutputFormats
from worker.tokenizer import Tokenizer

log = logging.getLogger("worker")

MAX_BAD_WORD_TOKENS = 1024  # each sequence of the request carries them, in each of its two spellings


@dataclass(frozen=True)
class ModelText:
    """What can be read while the engine is still loading."""

    files: ModelFiles
    tokenizer: Tokenizer
    templates: ChatTemplates
    defaults: sampling.Defaults
    formats: Formats

    @classmethod
    def load(cls, files: ModelFiles, settings: Settings) -> ModelText:
        """Raises SettingsError, also for defaults that no request could hold."""
        defaults = sampling.defaults(settings, files.generation_config)
        try:
            check_kwargs(settings.default_chat_template_kwargs)
        except TemplateError as error:
            raise SettingsError(f"DEFAULT_CHAT_TEMPLATE_KWARGS: {error}") from None
        try:
            tokenizer = Tokenizer.load(files.tokenizer_folder)
            chat_templates = templates.load(
                files.tokenizer_folder,
                template_type=settings.model_template_type,
                custom_template=settings.custom_chat_template,
                tokenizer=tokenizer,
            )
        except TokenizerError as error:
            raise SettingsError(f"the tokenizer of {settings.model} cannot be used: {error}") from None
        except TemplateError as error:
            raise SettingsError(str(error)) from None
        _look_at(chat_templates, settings)
        return cls(files, tokenizer, chat_templates, defaults, _formats(files, chat_templates, settings))


class ServedModel:
    def __init__(self, text: ModelText, settings: Settings, info: EngineInfo) -> None:
        if (room := info.num_pages * info.page_size) < info.max_model_len:
            log.warning("the KV cache holds %d tokens: that is the context, not %d", room, info.max_model_len)
            info = replace(info, max_model_len=room)
        self._text = text
        self.settings = settings
        self.info = info
        self.files = text.files
        self.tokenizer = text.tokenizer
        self.templates = text.templates
        self.names = settings.served_names
        self.created = int(time.time())
        self.fingerprint = f"worker-paged-{VERSION}"
        self.defaults = text.defaults
        self.sampling = sampling.Model(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            stop_ids=_stop_ids(text, text.templates.stop, info.vocab_size),
            max_logprobs=settings.max_logprobs,
        )
        write_calls = registry.call_writer(text.formats.tool)
        self.prompts = PromptBuilder(self.tokenizer, self.templates, self.sampling, settings, write_calls)
        self.grammars = GrammarCompiler(text.files.tokenizer_folder, info.vocab_size)  # for searches that run here
        self.outputs = OutputFormats(text.formats, self.tokenizer)

    @property
    def root(self) -> str:
        """The model's own name, whatever it is served as."""
        return public_name(self.settings.model)

    def resolve(self, name: str) -> str:
        """The id under which a request for `name` is answered; "" is the model. Raises ModelNotFound."""
        accepted = (*self.names, self.root, self.settings.model)
        if not name or self.settings.accept_any_model_name or name.lower() in {known.lower() for known in accepted}:
            return next((known for known in self.names if known.lower() == name.lower()), self.names[0])
        served = ", ".join(self.names)
        raise ModelNotFound(f"The model {quote(name)} does not exist. Served here: {served}.", param="model")

    def stop_words(self, prompt: Prompt) -> tuple[str, ...]:
        """What ends an answer to this prompt beside token ids."""
        if prompt.rendered is None:
            return ()
        stop = prompt.stop or self.templates.stop
        return tuple(dict.fromkeys([*stop.words, *prompt.rendered.stop_words]))

    def limits(self, prompt: Prompt) -> sampling.Model:
        """What sampling must know: the stop ids are those of the template that made the prompt."""
        if prompt.stop is None:
            return self.sampling
        return replace(self.sampling, stop_ids=_stop_ids(self._text, prompt.stop, self.info.vocab_size))

    def bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token sequences that spell each word, at the start of a text and after a space. Raises BadRequest."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for spelled in (word, " " + word.lstrip()):
                found[tuple(self.tokenizer.encode(spelled, add_special_tokens=False))] = None
            if sum(map(len, found)) > 2 * MAX_BAD_WORD_TOKENS:
                text = f"must come to at most {MAX_BAD_WORD_TOKENS} tokens"
                fail("bad_words", text, "array_above_max_length")
        return [ids for ids in found if ids and max(ids) < self.info.vocab_size]

    def answer_role(self, request: ChatCompletionRequest) -> str:
        """Without a generation prompt the answer goes on in the last message's role."""
        return self.settings.response_role if request.add_generation_prompt else str(request.messages[-1]["role"])

    def facts(self) -> dict[str, Any]:
        """For the log and for whoever asks why the model answers as it does."""
        tokenizer = self.tokenizer
        return {
            "template": self.templates.why,
            "stop_token_ids": sorted(self.sampling.stop_ids),
            "stop_tokens": [tokenizer.token_str(token_id) for token_id in sorted(self.sampling.stop_ids)],
            "stop": list(self.templates.stop.words),
            "tool_call_parser": self.outputs.formats.tool,
            "reasoning_parser": self.outputs.formats.reasoning,
        }


def _stop_ids(text: ModelText, stop: Stop, vocab_size: int) -> frozenset[int]:
    """The model's eos ids and the end-of-turn tokens of a template. Some checkpoints name ids that their own weights
    do not have: these can never come."""
    ids = {*text.files.eos_ids, *text.tokenizer.eos_ids}
    for token in stop.tokens:
        if (token_id := text.tokenizer.token_id(token)) is not None:
            ids.add(token_id)
    return frozenset(token_id for token_id in ids if 0 <= token_id < vocab_size)


def _formats(files: ModelFiles, chat_templates: ChatTemplates, settings: Settings) -> Formats:
    """What the operator named, else what the template shows. Raises SettingsError."""
    try:
        return registry.formats(
            chat_templates.text,
            files.model_type,
            sample=_sample_call(chat_templates),
            response_template=files.tokenizer_config.get("response_template"),
            tool=settings.tool_call_parser,
            reasoning=settings.reasoning_parser,
        )
    except UnknownFormat as error:
        raise SettingsError(str(error)) from None


def _look_at(chat_templates: ChatTemplates, settings: Settings) -> None:
    """Tells the operator of a template that clients will have trouble with. (It may need what a request can bring.)"""
    question = "Wortprobe"
    try:
        messages = [{"role": "user", "content": question}]
        text = chat_templates.render(messages, kwargs=settings.default_chat_template_kwargs).text
    except TemplateError as error:
        log.warning("the chat template fails at a plain question: %s", error)
    else:
        if question not in text:
            log.warning("the chat template does not write what a user says")


def _sample_call(chat_templates: ChatTemplates) -> str:
    """A chat in which a tool is called, as the template itself writes it; "" where it cannot."""
    function = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look up a."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        tools = [{"type": "function", "function": function}]
        rendered = chat_templates.render(
            messages, tools=tools, add_generation_prompt=False, write_calls=lambda calls: ""
        )
    except TemplateError:
        return ""
    return "" if rendered.react else rendered.text
