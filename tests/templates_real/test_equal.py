"""Prompts and ids of real templates against transformers, over all families and a matrix of conversations.

Where transformers cannot render (a template that wants arguments as text, a list of tools, text instead of parts),
ours may; where it can, ours is equal to the byte.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import templates
from builder.fetch_test_templates import ensure
from tests.templates_real.conversations import CONVERSATIONS
from worker.tokenizer import Tokenizer


def reference(tokenizer: Any, name: str) -> tuple[str, list[int]] | None:
    """(text, ids) by transformers, or None if it cannot render."""
    messages, options = CONVERSATIONS[name]
    options = {"add_generation_prompt": True, **options}
    options |= options.pop("kwargs", {})
    try:
        text = tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options)
    except Exception:  # templates raise whatever they like
        return None
    ids = tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=True, return_dict=False, **options)
    return text, ids


def leaks_parts(text: str) -> bool:
    """Whether a part was printed as data or lost: that is what transformers does where a template takes text only."""
    return "'type'" in text or '"type": "text"' in text or "Hi" not in text


def loses_calls(messages: list[dict[str, Any]], text: str) -> bool:
    """Whether the template passes over a tool call."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return any(call["arguments"]["location"] not in text for call in calls)


def test_a_family_renders_as_in_transformers(folder: Path) -> None:
    chat, tokenizer = templates.load(folder), Tokenizer.load(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    compared, different = 0, []
    for name, (messages, options) in CONVERSATIONS.items():
        expected = reference(theirs, name)
        if expected is None or (name == "parts" and leaks_parts(expected[0])) or loses_calls(messages, expected[0]):
            continue
        rendered = chat.render(messages, **{"add_generation_prompt": True, **options})
        if rendered.react:  # the template ignores tools; transformers leaves them out without a word
            continue
        compared += 1
        if rendered.text != expected[0] or tokenizer.encode_pieces(rendered.pieces) != expected[1]:
            different.append((name, expected[0], rendered.text))
    assert different == []
    assert compared or chat.render([{"role": "user", "content": "Hi"}]).text


def test_there_are_at_least_25_families() -> None:
    makers = {file.stem.split("-")[0].lower() for file in ensure().glob("*.jinja")}
    assert len(makers) >= 25, sorted(makers)


def test_every_template_takes_one_text_part_as_the_text(folder: Path) -> None:
    chat = templates.load(folder)
    as_text = chat.render([{"role": "user", "content": "Hi"}]).text
    assert chat.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]).text == as_text


# What ends an answer, by the models' own generation configs.
ENDS = {
    "ByteDance-Seed-OSS": "<seed:eos>",
    "GLM-4.6": "<|user|>",
    "HuggingFaceTB-SmolLM3-3B": "<|im_end|>",
    "Kimi-K2-Instruct": "<|im_end|>",
    "LFM2-8B-A1B": "<|im_end|>",
    "MiniMax-M2": "[e~[",
    "Mistral-Small-3.2-24B-Instruct-2506": "</s>",
    "NVIDIA-Nemotron-Nano-v2": "<SPECIAL_12>",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "<|im_end|>",
    "Qwen-Qwen2.5-7B-Instruct": "<|im_end|>",
    "Qwen-Qwen3-0.6B": "<|im_end|>",
    "Qwen3.5-4B": "<|im_end|>",
    "deepseek-ai-DeepSeek-V3.1": "<｜end▁of▁sentence｜>",
    "google-gemma-2-2b-it": "<end_of_turn>",
    "google-gemma-4-31B-it": "<turn|>",
    "ibm-granite-granite-4.0": "<|end_of_text|>",
    "meta-llama-Llama-3.1-8B-Instruct": "<|eot_id|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>",
    "mistralai-Mistral-Nemo-Instruct-2407": "</s>",
    "openai-gpt-oss-120b": "<|return|>",
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_turn_is_found(name: str, tmp_path: Path) -> None:
    from tests.templates_real.families import make_folder

    source = (ensure() / f"{name}.jinja").read_text(encoding="utf-8")
    stop = templates.load(make_folder(source, tmp_path / "m")).stop
    assert stop.tokens == (ENDS[name],) and stop.words == ()
