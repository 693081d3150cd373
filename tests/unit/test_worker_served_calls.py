"""The served model writes calls of a history in its own form, where its template passes over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.fetch_test_templates import ensure
from engine.messages import EngineInfo
from tests.templates_real.families import make_folder
from worker.model_files import ModelFiles
from worker.protocol.requests import ChatCompletionRequest
from worker.served import ModelText, ServedModel
from worker.settings import Settings

INFO = EngineInfo(10_000, 10_000, 16, 1_000, "cpu", "float32", "sdpa", 8)
MESSAGES = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": '{"place": "Oslo"}'}}]},
    {"role": "tool", "content": "sunny"},
]


@pytest.mark.parametrize(
    ("name", "format", "written"),
    [
        ("LFM2-8B-A1B", "lfm2", '<|tool_call_start|>[look_up(place="Oslo")]<|tool_call_end|>'),
        (
            "ibm-granite-granite-3.3-2B-Instruct",
            "granite",
            '<|tool_call|>[{"name": "look_up", "arguments": {"place": "Oslo"}}]',
        ),
        (
            "HuggingFaceTB-SmolLM3-3B",
            None,
            '<tool_call>\n{"name": "look_up", "arguments": {"place": "Oslo"}}\n</tool_call>',
        ),
    ],
)
async def test_calls_that_the_template_does_not_write(
    name: str, format: str | None, written: str, tmp_path: Path
) -> None:
    folder = make_folder((ensure() / f"{name}.jinja").read_text(encoding="utf-8"), tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": "unheard_of"}', encoding="utf-8")
    settings = Settings.from_env({"MODEL_NAME": str(folder)}, has_gpu=False)
    model = ServedModel(ModelText.load(ModelFiles.read(folder, folder, settings), settings), settings, INFO)
    prompt = await model.prompts.chat(ChatCompletionRequest.parse({"messages": MESSAGES}))
    assert model.outputs.formats.tool == format  # read off the template, not off what is written for it
    assert prompt.text is not None and written in prompt.text and "sunny" in prompt.text
