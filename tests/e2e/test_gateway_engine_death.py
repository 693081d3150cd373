"""The whole path with the real worker and a scripted engine: an engine that dies, clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI

from tests.e2e.conftest import Serve
from tests.e2e.served import ROOT, Served

HANDLER = ROOT / "tests" / "fakes" / "scripted_handler.py"
SLOW = {"rules": [{"match": [1], "token_ids": list(range(300, 700)), "delay_s": 0.05}]}
MESSAGES: Any = [{"role": "user", "content": "count"}]


@pytest.fixture
def scripted(serve: Serve, demo_model: Path) -> Served:
    return serve(HANDLER, MODEL_NAME=str(demo_model), SCRIPTED_ENGINE=json.dumps(SLOW)).wait_ready()


def engine_pid(server: Served) -> int:
    for process in psutil.Process(server.pid).children(recursive=True):
        if "tests.fakes.scripted_engine" in process.cmdline():
            return process.pid
    raise AssertionError("no engine runs")


async def until_idle(server: Served) -> None:
    deadline = time.monotonic() + 5
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") > 0:
        assert time.monotonic() < deadline, "the engine still works for somebody who has left"
        await asyncio.sleep(0.1)


async def test_an_engine_killed_mid_stream_fails_each_request_once_and_is_replaced(scripted: Served) -> None:
    async with AsyncOpenAI(base_url=scripted.base_url, api_key="none", max_retries=0, timeout=60) as sdk:
        await check_that_leaving_frees_the_engine(sdk, scripted)
        streams = [
            await sdk.chat.completions.create(model="", messages=MESSAGES, stream=True, max_tokens=400)
            for _ in range(2)
        ]
        for stream in streams:
            for _ in range(3):
                await anext(aiter(stream))
        waits = asyncio.create_task(sdk.chat.completions.create(model="", messages=MESSAGES, max_tokens=400))
        await asyncio.sleep(0.5)
        before = scripted.child("scripted_handler.py")
        pids = [before, *(child.pid for child in psutil.Process(before).children(recursive=True))]
        os.kill(engine_pid(scripted), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
        with pytest.raises(openai.InternalServerError) as caught:
            await waits
        assert caught.value.status_code == 503
        scripted.wait_for_line(r"the worker ended \(exit code 1\)", 15)
        answer = await sdk.chat.completions.create(model="", messages=MESSAGES, max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def check_that_leaving_frees_the_engine(sdk: AsyncOpenAI, server: Served) -> None:
    stream = await sdk.chat.completions.create(model="", messages=MESSAGES, stream=True, max_tokens=400)
    await anext(aiter(stream))
    await stream.close()
    with pytest.raises(TimeoutError):
        call = sdk.chat.completions.create(model="", messages=MESSAGES, max_tokens=400)
        await asyncio.wait_for(call, 0.5)
    await until_idle(server)


def test_an_engine_that_cannot_load_is_one_line(serve: Serve, demo_model: Path, tmp_path: Path) -> None:
    """Through the real handler, so that its way of saying it is the one that is understood."""
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model", "architectures": ["NoSuchModel"]}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"")
    server = serve(MODEL_NAME=str(tmp_path))
    assert server.wait(120) == 1
    assert server.lines[-1].startswith("error: ") and "no_such_model" in server.lines[-1]
    assert not [line for line in server.lines if "Traceback" in line]


def test_a_model_that_is_not_there_is_one_line(serve: Serve) -> None:
    server = serve(MODEL_NAME="/no/such/folder")
    assert server.wait(60) == 1
    assert server.lines[-1].startswith("error: MODEL_NAME=/no/such/folder: ")
