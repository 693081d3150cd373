"""What the engine counts about itself: totals since start, time by phase, throughput for Retry-After."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter

import psutil

from engine.messages import FinishReason, Stats
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence

RETRY_AFTER_S = (1.0, 60.0)  # the range of an estimate; its lower end while nothing has been measured


class Counters:
    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self._num_steps = 0
        self._max_batch = 0
        self._step_s: defaultdict[str, float] = defaultdict(float)
        self._finished: Counter[str] = Counter()
        self._recent_ends: deque[float] = deque(maxlen=64)  # when admitted sequences ended, seconds (monotonic)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of its body to a phase of the step."""
        start = perf_counter()
        try:
            yield
        finally:
            self._step_s[name] += perf_counter() - start

    def count_step(self, plan: Plan) -> None:
        self._num_steps += 1
        self._max_batch = max(self._max_batch, len(plan.parts))

    def count_prompt(self, seq: Sequence) -> None:
        self.prompt_tokens += seq.num_prompt
        self.cached_prompt_tokens += seq.cached_tokens or 0

    def count_finish(self, reason: FinishReason, was_admitted: bool) -> None:
        self._finished[reason.value] += 1
        if was_admitted:
            self._recent_ends.append(monotonic())

    def retry_after_s(self, num_waiting: int) -> float:
        """Seconds until so many waiting sequences have had their turn, at the pace of the recent ends."""
        low, high = RETRY_AFTER_S
        if len(self._recent_ends) < 2:
            return low
        ends_per_s = len(self._recent_ends) / max(monotonic() - self._recent_ends[0], 1e-3)
        return min(max(num_waiting / ends_per_s, low), high)

    def snapshot(self, scheduler: Scheduler, num_waiting: int) -> Stats:
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=num_waiting,
            num_pages=scheduler.pool.num_pages,
            num_free_pages=scheduler.pool.num_free,
            num_cached_pages=scheduler.pool.num_cached,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            generation_tokens=self.generation_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            max_batch=self._max_batch,
            prefix_cache_queries=scheduler.cache_queries,
            prefix_cache_hits=scheduler.cache_hits,
            finished=dict(self._finished),
            step_s=dict(self._step_s),
            rss_bytes=psutil.Process().memory_info().rss,
        )
