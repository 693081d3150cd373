"""Runs a client's script in its own environment against an endpoint and reads its report. Knows no client."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCRIPT_TIMEOUT_S = 600
# Nothing but the endpoint may be reached: a client that phones home meets a closed port at once.
_NO_INTERNET = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
_QUIET = {
    "DO_NOT_TRACK": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Endpoint:
    base_url: str  # ends with /v1
    api_key: str
    model: str
    model_dir: Path


@dataclass(frozen=True)
class Outcome:
    """How one check of a script ended."""

    error: str | None  # None = passed; else the script's traceback


class Outcomes(dict[str, Outcome]):
    """check name -> outcome. A check that the script never reported failed with the script's last words."""

    def __init__(self, last_words: str) -> None:
        super().__init__()
        self.last_words = last_words

    def __missing__(self, check: str) -> Outcome:
        return Outcome(f"the script ended before this check\n{self.last_words}")


def run_script(program: str, script: Path, endpoint: Endpoint) -> Outcomes:
    """Runs `script` with the interpreter `program` to its end."""
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report"
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": home,  # no client finds a configuration or a cache
            "LANG": "C.UTF-8",
            **_NO_INTERNET,
            **{name.upper(): value for name, value in _NO_INTERNET.items()},
            **_QUIET,
            "CLIENT_BASE_URL": endpoint.base_url,
            "CLIENT_API_KEY": endpoint.api_key,
            "CLIENT_MODEL": endpoint.model,
            "CLIENT_MODEL_DIR": str(endpoint.model_dir),
            "CLIENT_REPORT": str(report),
        }
        outcomes = Outcomes(_run([program, str(script)], variables))
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
        for line in map(json.loads, lines):
            outcomes[line["check"]] = Outcome(line["error"])
        return outcomes


def _run(command: list[str], variables: dict[str, str]) -> str:
    """Runs `command` to its end; returns the end of its output."""
    try:
        done = subprocess.run(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SCRIPT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode(errors='replace')[-3000:]}\nstopped after {SCRIPT_TIMEOUT_S} s"
    return f"{done.stdout.decode(errors='replace')[-3000:]}\nexit status {done.returncode}"
