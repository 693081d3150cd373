"""A shared machine is noisy: wait for a quiet moment, and know how much others took while we measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

QUIET_SHARE = 0.05  # of all cores, taken by others


def wait_for_quiet(timeout_s: float = 120.0) -> bool:
    """Waits until others took less than QUIET_SHARE of the machine for a second. False when that never came."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if psutil.cpu_percent(interval=1.0) / 100 < QUIET_SHARE:
            return True
    return False


@dataclass
class Disturbance:
    """What other processes took of the machine during a measurement."""

    share: float = 0.0  # CPU time of others over (wall time x cores)

    @property
    def too_much(self) -> bool:
        return self.share > QUIET_SHARE


@contextmanager
def watched(pids: Iterable[int]) -> Iterator[Disturbance]:
    """Measures the CPU time of all processes but `pids`, their children and this one, while the block runs."""
    seen = Disturbance()
    ours = set(pids)
    busy, mine, started = _busy_s(), _cpu_s(ours), time.monotonic()
    yield seen
    others_s = (_busy_s() - busy) - (_cpu_s(ours) - mine)
    seen.share = max(0.0, others_s) / ((time.monotonic() - started) * (psutil.cpu_count() or 1))


def _busy_s() -> float:
    """CPU seconds that the whole machine has spent on anything, stolen time included, since it booted."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _cpu_s(pids: set[int]) -> float:
    processes = {psutil.Process()}
    for pid in pids:
        parent = psutil.Process(pid)
        processes |= {parent, *parent.children(recursive=True)}
    return sum(sum(process.cpu_times()[:2]) for process in processes)
