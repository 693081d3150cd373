"""A whole worker around a real or a scripted engine process, without the SDK's loop around it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.client import EngineProcess
from worker.model_files import ModelFiles
from worker.served import ModelText
from worker.settings import Settings, engine_config
from worker.worker import Worker

SCRIPTED = "tests.fakes.scripted_engine"


@contextmanager
def worker_for(
    model_dir: Path, *, script: dict[str, Any] | None = None, exits: list[int] | None = None, **environ: str
) -> Iterator[Worker]:
    """A worker that is ready. `script`: of the scripted engine, instead of the model. `exits` notes exit codes."""
    settings = Settings.from_env({"MODEL_NAME": str(model_dir), **environ}, has_gpu=False)
    files = ModelFiles.find(settings)
    before = os.environ.get("SCRIPTED_ENGINE")
    if script is not None:
        os.environ["SCRIPTED_ENGINE"] = json.dumps(script)
    config = engine_config(settings, files.folder)
    process = EngineProcess.launch(config, SCRIPTED) if script is not None else EngineProcess.launch(config)
    if script is not None:
        os.environ.pop("SCRIPTED_ENGINE")
        if before is not None:
            os.environ["SCRIPTED_ENGINE"] = before
    try:
        text = ModelText.load(files, settings)
        yield Worker(settings, text, process, process.wait_ready(), exit=(exits if exits is not None else []).append)
    finally:
        process.stop()


async def outputs(worker: Worker, job_input: Any, job_id: str = "job-1") -> list[Any]:
    """Everything that the handler yields for a job."""
    return [item async for item in worker.handle({"id": job_id, "input": job_input})]


def chat(**body: Any) -> dict[str, Any]:
    body.setdefault("messages", [{"role": "user", "content": "Hi"}])
    return {"openai_route": "/v1/chat/completions", "openai_input": body}


def completion(**body: Any) -> dict[str, Any]:
    return {"openai_route": "/v1/completions", "openai_input": body}


async def body_of(worker: Worker, job_input: Any) -> Any:
    """The one body that a job without a stream is answered with."""
    (body,) = await outputs(worker, job_input)
    assert json.dumps(body, allow_nan=False, ensure_ascii=False).encode("utf-8")
    return body


async def error_of(worker: Worker, job_input: Any) -> dict[str, Any]:
    """Status and error of a job that is refused."""
    (item,) = await outputs(worker, job_input)
    carried: dict[str, Any] = json.loads(item["error"])
    return {"status": carried["status"], **carried["error"]}


async def events_of(worker: Worker, job_input: Any) -> list[Any]:
    """The parsed events of a streamed job, the last one without [DONE]."""
    items = await outputs(worker, job_input)
    return parse_events("".join(items))


def parse_events(text: str) -> list[Any]:
    blocks = text.split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    lines = [block for block in blocks[:-2] if not block.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]
