"""What the run of the clients rests on: a check that fails, or is never reached, is seen; locks are complete."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.clients.environments import HERE, NODE
from tests.clients.running import Endpoint, run_script

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(HERE / "scripts")!r})
import harness

def check_good(): assert harness.MODEL == "some-model"
async def check_bad(): raise ValueError("the reason")
def check_internet():
    import urllib.request
    with harness.raises(OSError): urllib.request.urlopen("http://example.invalid", timeout=5)
    raise RuntimeError(os.environ["HTTPS_PROXY"])
def check_that_ends_the_process():
    print("last words", flush=True)
    os._exit(3)
def check_never_reached(): pass

harness.run(globals())
"""


def test_every_check_of_a_script_has_an_outcome(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outcomes = run_script(sys.executable, script, Endpoint("http://127.0.0.1:9/v1", "key", "some-model", tmp_path))
    assert outcomes["check_good"].error is None
    assert "ValueError: the reason" in str(outcomes["check_bad"].error)
    assert "RuntimeError: http://127.0.0.1:9" in str(outcomes["check_internet"].error)
    for unreported in ("check_that_ends_the_process", "check_never_reached"):
        assert re.search(r"last words\s+exit status 3", str(outcomes[unreported].error))


@pytest.mark.parametrize("lock", sorted((HERE / "locks").glob("*.txt")), ids=lambda lock: lock.stem)
def test_a_lock_pins_everything_and_names_no_host(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)] == []
    assert not [line for line in lines if line.lower().startswith(("torch", "nvidia", "triton"))]


def test_the_node_lock_names_no_host() -> None:
    assert '"resolved"' not in (NODE / "package-lock.json").read_text()
