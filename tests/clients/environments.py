"""One environment per client: a venv made from its lock file, or node_modules; made once and kept.

Knows how clients are installed, nothing about what they then do.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
VENVS = HERE.parents[1] / ".venv-clients"
NODE = HERE / "node"
INSTALL_TIMEOUT_S = 600


class NotInstalled(Exception):
    """The client could not be installed; the message has the installer's last words."""


def not_installable() -> dict[str, str]:
    """environment name -> why it cannot be installed, from not_installable.txt."""
    lines = (HERE / "not_installable.txt").read_text(encoding="utf-8").splitlines()
    entries = [line.split(":", 1) for line in lines if line.strip() and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, reason in entries}


def interpreter(environment: str) -> str:
    """The program that runs this client's scripts, with everything it needs installed. Raises NotInstalled."""
    return _node() if environment == "node" else _python(environment)


def _python(environment: str) -> str:
    lock = HERE / "locks" / f"{environment}.txt"
    venv = VENVS / environment
    python = str(venv / "bin" / "python")
    stamp = venv / "installed"
    wanted = _fingerprint(sys.version, lock)
    if _says(stamp, wanted):
        return python
    _call([sys.executable, "-m", "venv", "--clear", str(venv)])
    # The lock is complete: --no-deps keeps anything else, above all torch, out.
    _call([python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(lock)])
    _call([python, "-m", "pip", "check"])
    stamp.write_text(wanted)
    return python


def _node() -> str:
    stamp = NODE / "node_modules" / "installed"
    wanted = _fingerprint("", NODE / "package-lock.json")
    if not _says(stamp, wanted):
        _call(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(NODE)])
        stamp.write_text(wanted)
    return "node"


def _fingerprint(version: str, lock: Path) -> str:
    return hashlib.sha256(version.encode() + lock.read_bytes()).hexdigest()


def _says(stamp: Path, wanted: str) -> bool:
    return stamp.exists() and stamp.read_text() == wanted


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from error
    if done.returncode:
        raise NotInstalled(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-2000:]}")
