"""The machine that is measured on: what it is, whether it is quiet, and how much others took while we measured."""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

QUIET_SHARE = 0.05  # of all cores, taken by others
NOTABLE_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve")


def about() -> dict[str, Any]:
    """CPU model, cores, instruction sets that matter here, memory (bytes)."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return {
        "cpu": facts.get("model name", platform.machine()),
        "family": f"{facts.get('cpu family', '?')}/{facts.get('model', '?')}",
        "cores": psutil.cpu_count(),
        "flags": [flag for flag in NOTABLE_FLAGS if flag in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }


def fast_dtype() -> str:
    """The unquantized type that this CPU multiplies fastest: bfloat16 only where it has instructions for it."""
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(about()["flags"]) else "float32"


def wait_for_quiet(pid: int | None = None, timeout_s: float = 120.0) -> bool:
    """Waits until others than `pid` took less than QUIET_SHARE of the machine for a second; False if they never did."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with watched(pid) as seen:
            time.sleep(1)
        if not seen.too_much:
            return True
    return False


def family(pid: int | None) -> list[psutil.Process]:
    """The process and everything that it started; empty if it is gone."""
    if pid is None:
        return []
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rss_bytes(pid: int) -> int:
    """Resident memory of the whole family; pages that they share count for each."""
    return sum(_of(process, lambda process: process.memory_info().rss) for process in family(pid))


def idle_share(pid: int, seconds: float = 2.0) -> float:
    """What a server takes of one core while it has nothing to do; some wait actively for a second or two first."""
    time.sleep(2)
    before = cpu_s(pid)
    time.sleep(seconds)
    return (cpu_s(pid) - before) / seconds


def suspend(pid: int) -> None:
    """Stops a whole family from running (SIGSTOP), so that it cannot disturb the measurement of another."""
    for process in family(pid):
        process.send_signal(signal.SIGSTOP)


def resume(pid: int) -> None:
    for process in family(pid):
        process.send_signal(signal.SIGCONT)


@dataclass
class Disturbance:
    """What other processes took of the machine during a measurement."""

    share: float = 0.0  # CPU time of others over (wall time x cores)
    server_cpu_s: float = 0.0  # of the server that was measured

    @property
    def too_much(self) -> bool:
        return self.share > QUIET_SHARE


@contextmanager
def watched(pid: int | None) -> Iterator[Disturbance]:
    """Measures the CPU time of all processes but `pid`, its family and this one, while the block runs."""
    seen = Disturbance()
    own = psutil.Process()
    busy, server, mine, started = _busy_s(), cpu_s(pid), _process_cpu_s(own), time.monotonic()
    yield seen
    seen.server_cpu_s = cpu_s(pid) - server
    others_s = (_busy_s() - busy) - seen.server_cpu_s - (_process_cpu_s(own) - mine)
    seen.share = max(0.0, others_s) / ((time.monotonic() - started) * (psutil.cpu_count() or 1))


def cpu_s(pid: int | None) -> float:
    """CPU seconds of the whole family so far."""
    return float(sum(_of(process, _process_cpu_s) for process in family(pid)))


def _process_cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def _of(process: psutil.Process, figure: Any) -> Any:
    try:
        return figure(process)
    except psutil.NoSuchProcess:  # ended since it was listed
        return 0


def _busy_s() -> float:
    """CPU seconds that the whole machine has spent on anything, stolen time included, since it booted."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
