"""The life and death of the engine process, with a scripted runner in place of the model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client import ROOT, EngineClient, EngineProcess, EngineStartError, RequestStream
from engine.messages import EngineConfig, FinishReason, SequenceOutput
from tests.fakes.driver import request

MODULE = "tests.fakes.scripted_engine"
SLOW = {"rules": [{"match": [1], "delay_s": 0.02}]}

Launch = Callable[..., EngineProcess]


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the socket folders are made. Short: a socket's path has a limit of 107 bytes."""
    folder = Path(f"/tmp/wp{os.getpid()}")
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def launch(temp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    processes: list[EngineProcess] = []

    def start(script: dict[str, Any] | None = None, **config: Any) -> EngineProcess:
        monkeypatch.setenv("SCRIPTED_ENGINE", json.dumps(script or {}))
        processes.append(EngineProcess.launch(EngineConfig("none", **config), module=MODULE))
        return processes[-1]

    yield start
    for process in processes:
        process.stop()
    assert list(temp.iterdir()) == [], "a socket folder is left behind"
    temp.rmdir()


async def last(stream: RequestStream) -> SequenceOutput:
    outputs = [output async for output in stream]
    assert all(output.finish is None for output in outputs[:-1])
    return outputs[-1]


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


# ---- start


def test_progress_and_info(launch: Launch) -> None:
    lines: list[str] = []
    info = launch(num_pages=50, page_size=8, max_num_seqs=3).wait_ready(lines.append)
    assert lines == ["reading the script"]
    assert (info.num_pages, info.page_size, info.max_num_seqs) == (50, 8, 3)


def test_launch_returns_before_the_model_is_loaded(launch: Launch) -> None:
    began = time.monotonic()
    process = launch({"load_s": 2.0})
    assert time.monotonic() - began < 1.8
    process.wait_ready()
    assert time.monotonic() - began > 2.0


def test_a_load_error_is_one_line(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    process = launch({"load_error": "the architecture Foo\nis not supported"})
    with pytest.raises(EngineStartError, match=r"^the architecture Foo is not supported$"):
        process.wait_ready()
    assert process.returncode not in (None, 0)
    assert "Traceback" not in capfd.readouterr().err


def test_a_model_folder_that_is_not_there(temp: Path) -> None:
    process = EngineProcess.launch(EngineConfig("/does/not/exist"))
    with pytest.raises(EngineStartError, match="exist") as failure:
        process.wait_ready()
    assert "\n" not in str(failure.value)
    temp.rmdir()


@pytest.mark.parametrize("config", [{"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"max_num_queued": -1}])
def test_a_configuration_that_cannot_work(launch: Launch, config: dict[str, int]) -> None:
    with pytest.raises(EngineStartError, match=next(iter(config))):
        launch(**config).wait_ready()


def test_death_while_loading(launch: Launch) -> None:
    process = launch({"load_s": 30})
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineStartError, match="signal 9"):
        process.wait_ready()


def test_a_module_that_cannot_be_started(temp: Path) -> None:
    with pytest.raises(EngineStartError, match="exit code 1"):
        EngineProcess.launch(EngineConfig("none"), module="engine.no_such_module").wait_ready()
    temp.rmdir()


def test_the_socket_is_private(launch: Launch, temp: Path) -> None:
    launch().wait_ready()
    (folder,) = temp.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_starting_needs_no_thread_and_no_torch() -> None:
    """The SDK forks right after wait_ready."""
    code = f"""
import sys, threading
from engine.client import EngineProcess
from engine.messages import EngineConfig
process = EngineProcess.launch(EngineConfig("none"), module={MODULE!r})
process.wait_ready()
print(threading.active_count(), len(__import__("os").listdir("/proc/self/task")), "torch" in sys.modules)
process.stop()
print(process.returncode)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "1", "False", "0"], done.stderr


# ---- end


async def test_kill_9_in_the_middle_of_streams(launch: Launch) -> None:
    process = launch(SLOW, max_num_seqs=3)
    client = EngineClient(process, process.wait_ready())
    streams = [client.submit(request(f"r{i}", [1, i], 1000)) for i in range(5)]  # three run, two wait
    await anext(streams[0])
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    ends = await asyncio.wait_for(asyncio.gather(*map(last, streams)), 5)
    assert time.monotonic() - began < 3
    assert {end.error.code for end in ends if end.error} == {"engine_dead"} and len(ends) == 5
    assert client.dead.is_set()
    late = await asyncio.wait_for(last(client.submit(request("late", [1], 5))), 1)
    assert late.error is not None and late.error.code == "engine_dead"
    await client.close()
    process.stop()
    assert process.returncode == -signal.SIGKILL


async def test_an_exception_in_the_step_is_loud_and_ends_every_request(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    process = launch({"rules": [{"match": [9], "crash_after": 3}, {"match": [1], "delay_s": 0.01}]}, max_num_seqs=3)
    client = EngineClient(process, process.wait_ready())
    streams = [client.submit(request(f"r{i}", [1, i + 20], 1000)) for i in range(4)]
    await anext(streams[0])
    streams.append(client.submit(request("fatal", [9], 1000, priority=-1)))
    client.abort("r0")
    ends = await asyncio.wait_for(asyncio.gather(*map(last, streams)), 5)
    assert [end.finish for end in ends] == [FinishReason.ABORT] + [FinishReason.ERROR] * 4
    process.stop()
    assert process.returncode == 1
    error = capfd.readouterr().err
    assert "Traceback" in error and "the script says so" in error
    await client.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_sigterm_ends_it_orderly(launch: Launch, busy: bool) -> None:
    process = launch(SLOW)
    client = EngineClient(process, process.wait_ready())
    stream = client.submit(request("r", [1], 1000 if busy else 1))
    await anext(stream)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    await asyncio.wait_for(client.dead.wait(), 4)
    process.stop()
    assert process.returncode == 0 and time.monotonic() - began < 4  # after 5 s it would be killed
    if busy:
        assert (await last(stream)).finish is FinishReason.ERROR
    await client.close()


async def test_the_terminals_ctrl_c_is_not_for_the_engine(launch: Launch) -> None:
    process = launch(SLOW)
    client = EngineClient(process, process.wait_ready())
    stream = client.submit(request("r", [1], 10))
    await anext(stream)
    os.kill(process.pid, signal.SIGINT)
    assert (await last(stream)).finish is FinishReason.LENGTH
    await client.close()


async def test_stop_kills_what_does_not_end(launch: Launch) -> None:
    process = launch({"rules": [{"delay_s": 60}]})
    client = EngineClient(process, process.wait_ready())
    client.submit(request("r", [1], 10))
    await asyncio.sleep(0.2)
    process.stop(timeout_s=0.2)
    assert process.returncode == -signal.SIGKILL
    await client.close()


PARENT = """
import asyncio, os, sys, time
from engine.client import EngineClient, EngineProcess
from engine.messages import EngineConfig
from tests.fakes.driver import request

async def main():
    process = EngineProcess.launch(EngineConfig("none"), module="tests.fakes.scripted_engine")
    if sys.argv[1] == "loading":
        print(process.pid, 0, flush=True)
        time.sleep(60)
    info = process.wait_ready()
    child = os.fork()  # like the SDK's ping process, which outlives a killed worker
    if child == 0:
        time.sleep(60)
        os._exit(0)
    client = EngineClient(process, info)
    if sys.argv[1] == "busy":
        await anext(client.submit(request("r", [1], 100_000)))
    elif sys.argv[1] == "stuck":
        client.submit(request("r", [2], 100_000))
        await asyncio.sleep(0.3)
    print(process.pid, child, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("doing", ["loading", "idle", "busy", "stuck"])
def test_the_engine_never_outlives_its_parent(doing: str, temp: Path) -> None:
    """Whatever it does at the time: loading, sleeping, stepping, or in the middle of a very long step."""
    script = {"load_s": 30 if doing == "loading" else 0}
    script |= {"rules": [*SLOW["rules"], {"match": [2], "delay_s": 60}]}  # type: ignore[dict-item]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, doing],
        cwd=ROOT,
        env={**os.environ, "SCRIPTED_ENGINE": json.dumps(script)},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    engine, child = map(int, parent.stdout.readline().split())
    try:
        assert psutil.pid_exists(engine)
        parent.kill()
        parent.wait()
        assert gone(engine), "the engine outlives its parent"
        assert list(temp.iterdir()) == []
        assert not child or psutil.pid_exists(child), "the forked child lives: it was not its end that was noticed"
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        temp.rmdir()
