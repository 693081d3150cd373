"""The worker: settings, model, engine and serving put together behind the handler that the SDK calls.

The SDK brings the event loop. Its first call of `concurrency` or `handle` in it connects to the engine; from then on
the engine's death ends this process, by way of the jobs in flight: each fails once, with its answer posted, and a job
that arrives later is left unanswered for the platform to hand to another worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.client import EngineClient, EngineProcess
from engine.messages import EngineInfo
from worker import jobs
from worker.delivery import deliver, envelope
from worker.errors import WorkerError
from worker.metrics import Metrics
from worker.served import ModelText, ServedModel
from worker.serving import Serving
from worker.settings import Settings

log = logging.getLogger("worker")

# After the engine's death: for the jobs in flight to be posted. Then the process leaves in any case.
EXIT_AFTER_S = 4.5


def _exit(code: int) -> None:
    """Leaves at once: nothing of the SDK's loops may hold the process."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


class Worker:
    def __init__(
        self,
        settings: Settings,
        text: ModelText,
        process: EngineProcess,
        info: EngineInfo,
        exit: Callable[[int], None] = _exit,
    ) -> None:
        """`exit` ends the process."""
        self._settings = settings
        self._process = process
        self._info = info
        self._exit = exit
        self.model = ServedModel(text, settings, info)
        self._serving = Serving(self.model, self._connect, Metrics(self.model.names[0], info))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: EngineClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[Any]] = set()

    def concurrency(self, _: int) -> int:
        """The SDK's concurrency_modifier: a constant, since the SDK takes no jobs while it changes."""
        self._connect()
        assert self._settings.max_concurrency is not None
        return self._settings.max_concurrency

    async def handle(self, job: dict[str, Any]) -> AsyncIterator[Any]:
        """The SDK's handler: yields the answer's text or body, or one error envelope. Raises CancelledError only."""
        if self._connect().dead.is_set():
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        try:
            operation = jobs.parse(job.get("input"))
        except WorkerError as error:
            yield envelope(error)
            return
        answer = self._serving.answer(operation, str(job.get("id") or "unnamed"))
        settings = self._settings
        interval_s = settings.stream_interval_ms / 1000
        async for item in deliver(answer, interval_s=interval_s, keep_alive_s=settings.keep_alive_s):
            yield item

    def _connect(self) -> EngineClient:
        """The engine client of the running loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = EngineClient(self._process, self._info)
            self._watch = loop.create_task(self._leave_after(self._client))
        return self._client

    async def _leave_after(self, client: EngineClient) -> None:
        """Ends the process once the engine has, and the jobs in flight have been answered."""
        await client.dead.wait()
        log.error("the engine is gone: %d jobs in flight fail, then this worker ends", len(self._jobs))
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=EXIT_AFTER_S)
        self._exit(1)
