"""One served project for all clients: what `make serve` starts, with the demo model, a key and a port of its own."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.environments import interpreter
from tests.clients.running import Endpoint, Outcomes, run_script

ROOT = Path(__file__).parents[2]
API_KEY = "client-key"
READY_WITHIN_S = 180
ENDS_WITHIN_S = 30


@pytest.fixture(scope="session")
def endpoint(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    log = tmp_path_factory.mktemp("serve") / "log"
    own = {"HOST": "127.0.0.1", "PORT": "0", "API_KEY": API_KEY, "MODEL_NAME": str(demo_model)}
    # One thread: on two cores the other is the clients', and threads that wait for each other are slower than one.
    environ = {**os.environ, **own, "NUM_THREADS": "1"}
    command = [sys.executable, "-u", "-m", "gateway.supervisor", "--env-file", os.devnull]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Endpoint(_base_url(process, log), API_KEY, demo_model.name, demo_model)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _base_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits for the ready line."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        ready = re.search(r"^ready in .* base_url (\S+)", log.read_text(errors="replace"), re.MULTILINE)
        if ready:
            return ready[1]
        time.sleep(0.2)
    raise AssertionError(f"the project does not serve:\n{log.read_text(errors='replace')[-4000:]}")


@pytest.fixture(scope="session")
def outcome_of(endpoint: Endpoint) -> Callable[[Path, str], Outcomes]:
    """(script, environment) -> the outcomes of its checks; each script runs once."""

    @functools.cache
    def outcomes(script: Path, environment: str) -> Outcomes:
        return run_script(interpreter(environment), script, endpoint)

    return outcomes
