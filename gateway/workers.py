"""The workers that take jobs here: what each one holds, what it is to stop, and whether it is still there.

A worker is its polls. Its pings come from a process of its own, which outlives a killed worker and goes on pinging:
so once a worker has broken off a poll, pings no longer count until it polls again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.job import Job

# Silence after which an unsupervised worker counts as gone. (A supervised one is reported by its exit.)
LOST_AFTER_S = 30.0
# A stop that reaches the SDK before it has started the job is dropped; pings that still name the job tell.
STOP_CONFIRMED_AFTER_S = 3.0


@dataclass(eq=False, slots=True)
class Worker:
    id: str
    contact: float  # last sign of life
    jobs: dict[str, Job] = field(default_factory=dict)
    stopping: dict[str, float] = field(default_factory=dict)  # job id -> when it was given up
    open_polls: int = 0
    hung_up: bool = False
    unsent_stops: set[str] = field(default_factory=set)
    _stop_added: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, job_id: str, now: float) -> None:
        self.stopping.setdefault(job_id, now)
        self.unsent_stops.add(job_id)
        self._stop_added.set()

    async def stops(self, hold_s: float) -> list[str]:
        """The ids of jobs to stop, waiting up to `hold_s` for one."""
        if not self.unsent_stops:
            self._stop_added.clear()
            try:
                async with asyncio.timeout(hold_s):
                    await self._stop_added.wait()
            except TimeoutError:
                return []
        taken = sorted(self.unsent_stops)
        self.unsent_stops.clear()
        return taken

    def release_poll(self) -> None:
        """Lets a waiting stop poll go with nothing."""
        self._stop_added.set()

    def confirm_stops(self, listed: set[str], now: float) -> None:
        """After a ping: repeats the stops of jobs that still run, forgets those that are gone."""
        for job_id, since in list(self.stopping.items()):
            if job_id in listed:
                self.stop(job_id, now)
            elif now - since > STOP_CONFIRMED_AFTER_S:
                del self.stopping[job_id]
                self.unsent_stops.discard(job_id)

    def polled(self, now: float) -> None:
        self.contact = now
        self.hung_up = False
        self.open_polls += 1

    def poll_ended(self, now: float, *, broken_off: bool) -> None:
        self.open_polls -= 1
        self.contact = now
        self.hung_up = self.hung_up or broken_off

    def pinged(self, now: float) -> None:
        if not self.hung_up:
            self.contact = now

    def lost(self, now: float) -> bool:
        return self.open_polls == 0 and now - self.contact > LOST_AFTER_S
