"""Starts, crashes and ends of what `make serve` runs; with a scripted handler, so without a model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import OpenAI

from tests.e2e.conftest import Serve
from tests.e2e.served import ECHO, Served

MESSAGES: Any = [{"role": "user", "content": "x"}]


def stream(server: Served, events: list[dict[str, Any]], *do: Any) -> None:
    """Adds the events of a stream to `events` as they come, [DONE] as {}."""
    url = f"{server.origin}/v1/chat/completions"
    with httpx.stream("POST", url, json={"do": list(do), "stream": True}, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append({} if line == "data: [DONE]" else json.loads(line[6:]))


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_killed_worker_fails_what_ran_and_the_next_worker_runs_what_waited(serve: Serve) -> None:
    server = serve(ECHO, ECHO_CONCURRENCY="2").wait_ready(60)
    events: list[dict[str, Any]] = []
    streaming, _ = in_background(lambda: stream(server, events, ["say", "a"], ["sleep", 30]))
    until(lambda: bool(events))
    silent, answers = in_background(
        lambda: httpx.post(f"{server.origin}/v1/chat/completions", json={"do": [["sleep", 30]]}, timeout=60)
    )
    server.wait_for_line("Jobs in progress: 2")
    time.sleep(1.2)  # beyond doubt: both have started
    waiting, waited = in_background(
        lambda: OpenAI(base_url=server.base_url, api_key="none", max_retries=0).chat.completions.create(
            model="m", messages=MESSAGES, extra_body={"do": [["object", {"id": "late"}]]}
        )
    )
    time.sleep(0.3)
    worker = server.child("echo_handler.py")
    family = [child.pid for child in psutil.Process(worker).children(recursive=True)]
    assert family, "the SDK's ping process is missing, so its end cannot be seen"
    os.kill(worker, signal.SIGKILL)

    streaming.join(5)
    assert [event.get("error", {}).get("type") for event in events] == [None, "server_error", None]
    assert events[-1] == {}
    silent.join(5)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["type"] == "server_error"
    assert gone(family, 3), "the ping process outlives its worker"
    waiting.join(30)
    assert waited[0].id == "late"
    server.wait_for_line("the worker is ready again", 20)
    assert httpx.get(f"{server.origin}/v1/models").status_code == 200
    check_end(server, signal.SIGINT)


def check_end(server: Served, number: int) -> None:
    """One signal, sent to the supervisor alone, ends everything within seconds; running streams end properly."""
    events: list[dict[str, Any]] = []
    running, _ = in_background(lambda: stream(server, events, ["say", "a"], ["sleep", 60]))
    until(lambda: bool(events))
    pids = server.pids()
    assert len(pids) >= 4  # supervisor, gateway, worker, ping
    started = time.monotonic()
    server.send_signal(number)
    assert server.wait(15) == 0
    assert time.monotonic() - started < 10
    assert gone(pids, 0.5) and server.port_is_free()
    running.join(5)
    assert "shutting down" in events[-2]["error"]["message"] and events[-1] == {}
    server.wait_for_line("cancelled", 5)  # through the stop channel, not by the axe


def test_a_worker_told_to_end_finishes_what_runs_and_the_next_runs_what_it_took_too_late(serve: Serve) -> None:
    server = serve(ECHO).wait_ready(60)
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    running = [
        in_background(lambda: stream(server, first, ["say", "a"], ["sleep", 2.5], ["say", "end"]))[0],
        in_background(lambda: stream(server, second, ["say", "a"], ["sleep", 2.5], ["say", "end"]))[0],
    ]
    until(lambda: bool(first and second))
    os.kill(server.child("echo_handler.py"), signal.SIGTERM)
    time.sleep(0.3)
    # The worker's poll is still open and takes this job, which the SDK then never runs.
    late = httpx.post(f"{server.origin}/v1/chat/completions", json={"do": [["object", {"ok": True}]]}, timeout=60)
    assert late.json() == {"ok": True}
    for thread in running:
        thread.join(10)
    for events in (first, second):
        assert [bool(event.get("choices")) for event in events] == [True, True, False], events
    server.wait_for_line(r"the worker ended \(exit code 0\)")
    health = httpx.get(f"{server.jobs_url}/health").json()["jobs"]
    assert health["failed"] == 0


def test_a_worker_that_ignores_sigterm_is_killed_with_all_it_started(serve: Serve, tmp_path: Path) -> None:
    handler = tmp_path / "stubborn.py"
    text = ECHO.read_text()
    text = text.replace("await asyncio.sleep(values[0])", "__import__('time').sleep(values[0])")  # blocks the loop
    handler.write_text(text)
    server = serve(handler).wait_ready(60)
    httpx.post(f"{server.jobs_url}/run", json={"input": {"do": [["sleep", 60]]}})
    server.wait_for_line(r"Jobs in progress")
    time.sleep(0.5)
    pids = server.pids()
    started = time.monotonic()
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0
    assert time.monotonic() - started < 18
    assert gone(pids, 0.5) and server.port_is_free()


def test_a_supervisor_killed_outright_leaves_nothing_behind(serve: Serve) -> None:
    server = serve(ECHO).wait_ready(60)
    pids = server.pids()
    server.send_signal(signal.SIGKILL)
    server.wait(5)
    assert gone(pids, 8), [psutil.Process(pid).cmdline() for pid in pids if psutil.pid_exists(pid)]
    assert server.port_is_free()


def test_a_gateway_that_dies_ends_it_all(serve: Serve) -> None:
    server = serve(ECHO).wait_ready(60)
    pids = server.pids()
    os.kill(server.child("gateway.server"), signal.SIGKILL)
    assert server.wait(15) == 1
    assert server.lines[-1] == "error: the gateway ended (exit code -9)"
    assert gone(pids, 0.5)


def test_a_port_in_use_is_one_line(serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = serve(ECHO, PORT=port)
        assert server.wait(20) == 1
        assert server.lines == [f"error: port {port} on 127.0.0.1 is in use: stop what listens there or set PORT"]


def test_a_setting_out_of_range_is_one_line_that_names_it(serve: Serve) -> None:
    server = serve(ECHO, PORT="70000")
    assert server.wait(20) == 1
    assert len(server.lines) == 1 and server.lines[0].startswith("error: PORT=70000: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("print('error: no such model'); raise SystemExit(3)", "error: no such model"),
        ("raise SystemExit(3)", "error: the worker ended before it was ready (exit code 3)"),
        ("import os; os.kill(os.getpid(), 11)", "error: the worker ended before it was ready (SIGSEGV)"),
    ],
)
def test_a_worker_that_never_gets_ready_ends_it(serve: Serve, tmp_path: Path, text: str, reason: str) -> None:
    handler = tmp_path / "handler.py"
    handler.write_text(text)
    server = serve(handler)
    assert server.wait(20) == 1
    assert server.lines[-1] == reason
    assert not [line for line in server.lines if "Traceback" in line]


def test_the_worker_never_sees_the_users_key_nor_another_platform(serve: Serve, tmp_path: Path) -> None:
    handler = tmp_path / "handler.py"
    handler.write_text("import os; print('KEYS', os.environ.get('API_KEY'), os.environ.get('RUNPOD_REALTIME_PORT'))")
    server = serve(handler, API_KEY="sk-1", RUNPOD_REALTIME_PORT="8001")
    server.wait_for_line("KEYS None None")
    assert server.wait(20) == 1


def test_the_settings_file_is_read_and_the_environment_wins(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("PORT=70000\nHOST=127.0.0.1\n")
    command = [sys.executable, "-m", "gateway.supervisor", "--env-file", str(tmp_path / "env"), "--handler", str(ECHO)]
    environ = {name: value for name, value in os.environ.items() if name not in ("PORT", "HOST")}
    root = ECHO.parents[2]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "PORT=70000" in done.stderr
    done = subprocess.run(
        command, cwd=root, env={**environ, "PORT": "70001"}, capture_output=True, text=True, timeout=30
    )
    assert "PORT=70001" in done.stderr


def test_the_sdk_may_have_another_key_in_its_own_file(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / ".runpod").mkdir()
    (tmp_path / ".runpod" / "config.toml").write_text('[default]\napi_key = "another"\n')
    server = serve(ECHO, HOME=str(tmp_path)).wait_ready(60)
    sdk = OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(model="m", messages=MESSAGES, extra_body={"do": [["fail", 400, "as scripted"]]})
