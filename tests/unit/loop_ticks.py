"""Whether the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Ticks:
    """How often the loop came round, a millisecond or more apart."""

    count = 0


@asynccontextmanager
async def ticking() -> AsyncIterator[Ticks]:
    ticks = Ticks()

    async def tick() -> None:
        while True:
            ticks.count += 1
            await asyncio.sleep(0.001)

    task = asyncio.create_task(tick())
    await asyncio.sleep(0)
    try:
        yield ticks
    finally:
        task.cancel()
