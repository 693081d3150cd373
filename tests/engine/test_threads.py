"""How many threads, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

from engine import threads


def test_the_default_is_within_what_this_process_may_use():
    assert 1 <= threads.default_count() <= len(os.sched_getaffinity(0))


def test_a_process_bound_to_one_core_uses_one_thread():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from engine.threads import default_count; print(default_count())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


def test_threads_spin_briefly_unless_the_user_says_otherwise():
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ.pop("GOMP_SPINCOUNT", None)
    threads.before_torch()
    assert os.environ["GOMP_SPINCOUNT"] == "2000"
    os.environ["GOMP_SPINCOUNT"] = "5"
    threads.before_torch()
    assert os.environ["GOMP_SPINCOUNT"] == "5"
    del os.environ["GOMP_SPINCOUNT"]
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
    threads.before_torch()
    assert "GOMP_SPINCOUNT" not in os.environ
