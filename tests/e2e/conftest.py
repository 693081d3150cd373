"""Servers for the end-to-end tests: `served` is the real thing with the demo model; `echo` needs no model; `serve`
starts one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.served import ECHO, Served

Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def served(demo_model: Path) -> Iterator[Served]:
    """Gateway, SDK worker and engine with the demo model, exact arithmetic, as `make serve` starts them."""
    server = Served(environ={"MODEL_NAME": str(demo_model), "DTYPE": "float32"})
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def echo() -> Iterator[Served]:
    """Gateway and SDK worker with a scripted handler: no engine, no model. For tests that leave it as it was."""
    server = Served(ECHO)
    try:
        yield server.wait_ready(60)
    finally:
        server.stop()


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Serve:
    """Starts a server for one test: serve(handler=path, NAME="value", ...). Not waited for; stopped at the end.

    Without a handler it is the real one, with the demo model unless MODEL_NAME is given.
    """

    def start(handler: Path | None = None, **environ: str) -> Served:
        if handler is None and "MODEL_NAME" not in environ:
            environ["MODEL_NAME"] = str(request.getfixturevalue("demo_model"))
        server = Served(handler, environ)
        request.addfinalizer(server.stop)
        return server

    return start
