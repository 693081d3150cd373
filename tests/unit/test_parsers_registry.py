"""Which format a model gets: from real chat templates, by name, and by the checkpoint's own description."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builder.fetch_test_templates import ensure
from tests.unit.parser_samples import TOOLS, always
from worker.parsers.names import HARMONY, REASONING_ALIASES, RESPONSE_TEMPLATE, TOOL_ALIASES
from worker.parsers.reasoning import FAMILIES
from worker.parsers.registry import (
    FORMATS,
    Formats,
    UnknownFormat,
    detect,
    formats,
    pipeline,
    reasoning_format,
    tool_format,
)

# Real templates (without .jinja) and what their models write.
REAL = {
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", None),
    "GLM-4.6": ("glm45", "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "think"),
    "LFM2-8B-A1B": ("lfm2", None),
    "MiniMax-M1": ("tool_calls", None),
    "MiniMax-M2": ("minimax_m2", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_v11", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "StepFun3.5-Flash": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_dsml", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_dsml", "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("phi4_mini", None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "response"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_v11", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "openai-gpt-oss-120b": (HARMONY, HARMONY),
    "openbmb-MiniCPM5-1B": ("minicpm5", "think"),
}


@pytest.mark.parametrize("name", REAL)
def test_real_templates(name: str) -> None:
    assert detect((ensure() / f"{name}.jinja").read_text()) == REAL[name]


@pytest.mark.parametrize("name", [path.stem for path in sorted(ensure().glob("*.jinja"))])
def test_whatever_is_found_exists(name: str) -> None:
    tool, reasoning = detect((ensure() / f"{name}.jinja").read_text())
    assert tool in {None, HARMONY, *FORMATS} and reasoning in {None, HARMONY, *FAMILIES}


def test_a_template_that_shows_nothing_goes_by_the_model_type() -> None:
    assert detect("", "gpt_oss") == (HARMONY, HARMONY)
    assert detect("", "llama") == (None, None)
    assert detect("<tool_call>", "kimi_k2") == ("hermes", None)


def test_a_rendered_call_shows_what_the_source_hides() -> None:
    source = "{%- set t = 'tool' -%}{{ '<' + t + '_call>' }}"
    assert formats(source).tool is None
    assert formats(source, sample='<tool_call>{"name": "look_up"}</tool_call>').tool == "hermes"


class TestNames:
    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("hermes", "hermes"),
            ("Qwen25", "hermes"),
            ("qwen3-coder", "qwen3_coder"),
            ("llama4_pythonic", "pythonic"),
            ("openai", HARMONY),
            ("gpt-oss", HARMONY),
            ("granite-20b-fc", "granite"),
            ("deepseekv31", "deepseek_v31"),
        ],
    )
    def test_other_servers_names(self, given: str, name: str) -> None:
        assert tool_format(given) == name

    def test_every_alias_leads_somewhere(self) -> None:
        assert {tool_format(alias) for alias in TOOL_ALIASES} <= {HARMONY, RESPONSE_TEMPLATE, *FORMATS}
        assert {reasoning_format(alias) for alias in REASONING_ALIASES} <= {HARMONY, RESPONSE_TEMPLATE, *FAMILIES}

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(UnknownFormat, match=r"'nope'.*hermes.*qwen3_coder"):
            tool_format("nope")
        with pytest.raises(UnknownFormat, match=r"'nope'.*deepseek_r1.*think"):
            reasoning_format("nope")

    def test_the_operator_wins(self) -> None:
        assert formats("<tool_call>", tool="mistral", reasoning="deepseek-r1") == Formats("mistral", "think_always")


TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<reason>", "close": "</reason>"},
        "content": {"close": "<|end|>"},
        "tool_calls": {
            "open": "<<call ",
            "close": ">>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}},
        },
    },
}


class TestResponseTemplate:
    """The checkpoint describes its own format, one that no parser here knows."""

    FOUND = formats("", response_template=TEMPLATE)

    def read(self, text: str, prompt: str = "<|assistant|>") -> Any:
        return always(lambda: pipeline(self.FOUND, TOOLS, prompt=prompt), text)

    def test_it_is_used_where_nothing_else_is_known(self) -> None:
        assert (self.FOUND.tool, self.FOUND.reasoning) == (RESPONSE_TEMPLATE, RESPONSE_TEMPLATE)
        assert formats("<tool_call>", response_template=TEMPLATE).tool == "hermes"
        assert formats("<tool_call>", response_template=TEMPLATE, tool="hf").tool == RESPONSE_TEMPLATE

    @pytest.mark.parametrize("broken", [{}, {"fields": {}}, {**TEMPLATE, "version": 99}, 5])
    def test_a_broken_one_is_not_used(self, broken: Any) -> None:
        assert formats("", response_template=broken).tool is None
        with pytest.raises(UnknownFormat, match="TOOL_CALL_PARSER"):
            formats("", response_template=broken, tool="hf")

    def test_thoughts_answer_and_calls(self) -> None:
        text = '<reason>hm</reason>Hello<<call {"name": "f", "args": {"n": 1}}>><<call {"name": "f", "args": {}}>>'
        content, reasoning, calls = self.read(text)
        assert (content, reasoning) == ("Hello", "hm")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"n": 1}), ("f", {})]

    def test_what_the_prompt_wrote_counts(self) -> None:
        assert self.read("hm</reason>Hello", prompt="<|assistant|><reason>")[:2] == ("Hello", "hm")

    def test_calls_that_are_none_come_out_as_text(self) -> None:
        unknown = '{"name": "unknown", "args": {}}'
        assert self.read(f"Hi<<call {unknown}>>") == (f"Hi{unknown}", "", [])
        assert self.read("Hi<<call not json>> more")[0] == "Hinot json more"

    def test_plain_text(self) -> None:
        assert self.read("Hello  there\n") == ("Hello  there", "", [])
