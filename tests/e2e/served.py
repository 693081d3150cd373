"""A running server, started as `make serve` starts it, on a free port."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
ECHO = ROOT / "tests" / "fakes" / "echo_handler.py"
_READY = re.compile(r"^ready in .* base_url (http://\S+)/v1 ")


class Served:
    def __init__(self, handler: Path | None = None, environ: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-u", "-m", "gateway.supervisor", "--env-file", os.devnull]
        if handler is not None:
            command += ["--handler", str(handler)]
        self.environ = {**os.environ, "PORT": "0", "HOST": "127.0.0.1", **(environ or {})}
        self.lines: list[str] = []
        self.origin = ""
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if (found := _READY.match(line)) is not None:
                self.origin = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self, timeout_s: float = 180) -> Served:
        assert self._ready.wait(timeout_s) and self.origin, self.log()
        return self

    @property
    def base_url(self) -> str:
        return f"{self.origin}/v2/local/openai/v1"

    @property
    def jobs_url(self) -> str:
        return f"{self.origin}/v2/local"

    @property
    def model_dir(self) -> Path:
        return Path(self.environ["MODEL_NAME"])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def log(self) -> str:
        return "\n".join(self.lines)

    def pids(self) -> list[int]:
        """The supervisor and everything below it."""
        return [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]

    def child(self, script: str) -> int:
        """The pid of the child whose command line holds `script`."""
        for process in psutil.Process(self.pid).children():
            if any(script in part for part in process.cmdline()):
                return process.pid
        raise AssertionError(f"no child runs {script}")

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.origin}/metrics", timeout=30).raise_for_status().text
        sample = re.compile(re.escape(name) + r"(_total)?(\{.*\})? (\S+)")
        values = [float(found[3]) for line in text.splitlines() if (found := sample.fullmatch(line))]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_for_line(self, pattern: str, timeout_s: float = 20) -> re.Match[str]:
        """The first line of output, old or new, that matches."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if (found := re.search(pattern, line)) is not None:
                    return found
            time.sleep(0.02)
        raise AssertionError(f"no line matches {pattern!r} in:\n{self.log()}")

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        code = self._process.wait(timeout_s)
        self._reader.join(5)
        return code

    def stop(self) -> int:
        """SIGTERM, and the exit code. Kills what is left after a while, so that no test leaves processes behind."""
        if self._process.poll() is None:
            family = psutil.Process(self.pid).children(recursive=True)
            self.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                for process in [*family, psutil.Process(self.pid)]:
                    process.kill()
        return self.wait(10)

    def port_is_free(self) -> bool:
        port = int(self.origin.rsplit(":", 1)[1])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
            return True
