"""What a worker makes of settings and model files that do not fit one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.workers import body_of, chat, completion, error_of, worker_for
from worker.errors import SettingsError
from worker.model_files import ModelFiles
from worker.served import ModelText
from worker.settings import Settings


@pytest.fixture
def model(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model's folder with a generation_config.json that can be changed."""
    for file in demo_model.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


async def test_ids_that_the_weights_do_not_have_end_no_answer_and_harm_none(model: Path) -> None:
    """Checkpoints name eos ids beyond their own vocabulary; every request was a 500."""
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 49152, 999999, -1]}')
    with worker_for(model, script={}) as worker:
        body = await body_of(worker, chat(max_tokens=2))
        assert body["choices"][0]["finish_reason"] == "length"
        rendered = await body_of(worker, {**chat(), "openai_route": "/v1/chat/completions/render"})
        assert rendered["stop_token_ids"] == [2]


async def test_a_prompt_with_tokens_that_the_weights_do_not_have_is_refused(model: Path) -> None:
    """A tokenizer may have more tokens than the model: those were a 500, too."""
    beyond = 45_000
    with worker_for(model, script={"vocab_size": beyond}) as worker:
        word = worker.model.tokenizer.decode([beyond + 5], skip_special_tokens=False)
        for job, param in (
            (chat(messages=[{"role": "user", "content": f"a{word}"}]), "messages"),
            (completion(prompt=f"a{word}"), "prompt"),
            (completion(prompt=[5, beyond]), "prompt"),
        ):
            error = await error_of(worker, job)
            assert (error["status"], error["param"]) == (400, param) and str(beyond) in error["message"]
        assert (await body_of(worker, chat(max_tokens=1, bad_words=[word.strip()])))["choices"]


async def test_the_context_is_what_the_cache_can_hold(model: Path) -> None:
    """A smaller cache than context: clients were told the model's context, and refused at the cache's end."""
    (model / "generation_config.json").write_text("{}")
    with worker_for(model, script={"max_model_len": 256}, NUM_GPU_BLOCKS_OVERRIDE="6", BLOCK_SIZE="16") as worker:
        models = await body_of(worker, {"openai_route": "/v1/models"})
        assert models["data"][0]["max_model_len"] == 96
        error = await error_of(worker, completion(prompt=[5] * 96))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt") and " 96 " in error["message"]
        body = await body_of(worker, completion(prompt=[5] * 95, max_tokens=9))
        assert body["usage"]["total_tokens"] == 96 and body["choices"][0]["finish_reason"] == "length"
        cut = await body_of(worker, completion(prompt=[5] * 300, truncate_prompt_tokens=-1, max_tokens=1))
        assert cut["usage"]["prompt_tokens"] == 95


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"DEFAULT_CHAT_TEMPLATE_KWARGS": '{"tools": []}'}, "DEFAULT_CHAT_TEMPLATE_KWARGS"),
        ({"OVERRIDE_GENERATION_CONFIG": '{"temperature": "hot"}'}, "OVERRIDE_GENERATION_CONFIG: temperature"),
        ({"TOOL_CALL_PARSER": "nope"}, "nope"),
        ({"MODEL_TEMPLATE_TYPE": "nope"}, "MODEL_TEMPLATE_TYPE"),
        ({}, "generation_config.json: top_p"),
    ],
)
def test_what_no_request_could_be_answered_with_ends_the_start_while_the_engine_loads(
    model: Path, environ: dict[str, Any], told: str
) -> None:
    """Not minutes later, with the first request or when the weights are there."""
    (model / "generation_config.json").write_text("{}" if environ else json.dumps({"top_p": 7}))
    settings = Settings.from_env({"MODEL_NAME": str(model), **environ}, has_gpu=False)
    with pytest.raises(SettingsError, match=told):
        ModelText.load(ModelFiles.find(settings), settings)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ find_out() }}", "fails at a plain question: 'find_out' is undefined"),
        ("{{ bos_token }}", "does not write what a user says"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ""),
    ],
)
def test_an_operator_is_told_of_a_template_that_cannot_serve(
    model: Path, caplog: pytest.LogCaptureFixture, template: str, told: str
) -> None:
    settings = Settings.from_env({"MODEL_NAME": str(model), "CUSTOM_CHAT_TEMPLATE": template}, has_gpu=False)
    (model / "generation_config.json").write_text("{}")
    ModelText.load(ModelFiles.find(settings), settings)
    assert told in caplog.text and bool(told) == ("chat template" in caplog.text)
