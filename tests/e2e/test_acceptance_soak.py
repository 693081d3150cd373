"""500 random requests, many of them abandoned half-way: nothing is left behind afterwards."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI

REQUESTS = 500
AT_ONCE = 16
ALLOWED_GROWTH_BYTES = 20 * 1024 * 1024


async def one_request(client: AsyncOpenAI, model: str, rng: random.Random) -> str:
    """Sends one random request; returns how it ended."""
    prompt = " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 12)))
    max_tokens = rng.randrange(1, 25)
    sampling = {"temperature": rng.choice([0, 0.7, 1.3]), "seed": rng.randrange(1 << 30)}
    way = rng.choice(["whole", "streamed", "close the stream", "hang up"])
    messages: Any = [{"role": "user", "content": prompt}]
    if way == "hang up":
        call = client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens, **sampling)
        try:
            await asyncio.wait_for(call, timeout=rng.uniform(0.01, 1.0))
        except TimeoutError:
            return "cancelled"
        return "done"
    if way == "whole":
        await client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens, **sampling)
        return "done"
    stream: Any = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=max_tokens, stream=True, **sampling
    )
    leave_after = rng.randrange(1, 6) if way == "close the stream" else None
    received = 0
    async for _ in stream:
        received += 1
        if received == leave_after:
            await stream.close()
            return "cancelled"
    return "done"


def resident_bytes(pids: list[int]) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


async def until_idle(served: Any) -> None:
    for _ in range(100):
        if served.metric("vllm:num_requests_running") == 0 and served.metric("vllm:num_requests_waiting") == 0:
            await asyncio.sleep(3)  # freed memory goes back to the system when the engine has been idle for a second
            return
        await asyncio.sleep(0.1)
    raise AssertionError("requests are still in the engine 10 s after the last one ended")


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_random_requests_with_cancels_leave_nothing_behind(serve: Any) -> None:
    # Pages take memory when they are first used: so few that all of them are by half-time.
    served = serve(DTYPE="float32", NUM_GPU_BLOCKS_OVERRIDE="200").wait_ready()
    rng = random.Random(11)
    ends: list[str] = []
    memory_after_half = 0
    async with AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=120) as client:
        model = (await client.models.list()).data[0].id
        gate = asyncio.Semaphore(AT_ONCE)

        async def gated() -> None:
            async with gate:
                ends.append(await one_request(client, model, rng))

        for half in range(2):
            await asyncio.gather(*[gated() for _ in range(REQUESTS // 2)])
            await until_idle(served)
            if half == 0:
                memory_after_half = resident_bytes(served.pids())
    assert len(ends) == REQUESTS
    assert ends.count("cancelled") > REQUESTS // 10, "too few were cancelled for the test to mean anything"
    assert served.metric("vllm:kv_cache_usage_perc") == 0, "a page is still referenced"
    assert resident_bytes(served.pids()) - memory_after_half < ALLOWED_GROWTH_BYTES
