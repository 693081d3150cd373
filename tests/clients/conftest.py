"""One served project for all clients: what `make serve` starts, with the demo model, a key and a port of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clients.environments import interpreter
from tests.clients.running import Endpoint, Outcomes, run_script
from tests.e2e.served import Served

API_KEY = "client-key"
SCRIPTS_AT_ONCE = 3


@pytest.fixture(scope="session")
def endpoint(demo_model: Path) -> Iterator[Endpoint]:
    server = Served(environ={"MODEL_NAME": str(demo_model), "API_KEY": API_KEY})
    try:
        server.wait_ready()
        yield Endpoint(f"{server.origin}/v1", API_KEY, demo_model.name, demo_model)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest, endpoint: Endpoint) -> Iterator[Callable[[Path], Outcomes]]:
    """script -> the outcomes of its checks. The scripts of the selected tests run in their order, a few at a time:
    to the server they are users that come at once."""
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    environments = {each["script"]: each["environment"] for each in selected if "script" in each}

    def run(script: Path) -> Outcomes:
        return run_script(interpreter(environments[script]), script, endpoint)

    with ThreadPoolExecutor(SCRIPTS_AT_ONCE) as pool:
        runs = {script: pool.submit(run, script) for script in environments}
        yield lambda script: runs[script].result()
        pool.shutdown(cancel_futures=True)
