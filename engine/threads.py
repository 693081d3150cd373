"""What is to be settled before torch is imported: how its CPU threads wait for each other, and how memory is mapped;
and how many threads the forward pass uses. Knows no torch.

By default OpenMP's threads burn their core for long while they wait. On a machine whose cores are shared, and they
are at least with the worker's own process, that keeps the very thread from running which the others wait for: steps
took four times as long. So they spin for some 20 microseconds, which covers the gaps between operations, and sleep.

Weights and keys are read from end to end at every step. In pages of 4 KiB, a processor in a virtual machine looks up
addresses all the time; torch asks for pages of 2 MiB if told so (attention over pages: 15 % faster).
"""

from __future__ import annotations

import os
from pathlib import Path

_SPINS = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}  # GNU's OpenMP, Intel's


def before_torch() -> None:
    """Takes effect only before the first import of torch. What the user has set stays."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in _SPINS.items():
            os.environ.setdefault(name, value)


def default_count() -> int:
    """Physical cores that this process may use: two threads of one core only take turns in a matrix product."""
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    logical, physical = psutil.cpu_count() or usable, psutil.cpu_count(logical=False) or usable
    cores = max(1, usable * physical // logical)
    return max(1, min(cores, int(_container_limit() or cores)))


def _container_limit() -> float | None:
    """CPUs that the control group of a container grants, if it says so."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
