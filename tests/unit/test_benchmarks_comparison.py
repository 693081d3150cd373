"""What the side-by-side runs refuse and how they compare."""

from __future__ import annotations

import json

import numpy as np
import pytest
from aiohttp import web

from benchmarks import gguf_file, load, side_by_side
from benchmarks.load import LoadError, Workload
from benchmarks.machine import Disturbance


async def serve(output_tokens: int, prompt_tokens: int = 127) -> tuple[web.AppRunner, str]:
    """A server that answers every completion with so many tokens, and says so."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(output_tokens):
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}/v1"


@pytest.mark.parametrize(("output_tokens", "prompt_tokens"), [(63, 127), (64, 128)])
async def test_a_server_with_another_number_of_tokens_is_refused(output_tokens: int, prompt_tokens: int) -> None:
    runner, url = await serve(output_tokens, prompt_tokens)
    try:
        with pytest.raises(LoadError, match="tokens where"):
            await load.run(url, "model", ["text"] * 4, Workload(concurrency=2, requests=4))
    finally:
        await runner.cleanup()


async def test_a_server_with_the_right_number_of_tokens_is_measured() -> None:
    runner, url = await serve(64)
    try:
        result = await load.run(url, "model", ["text"] * 4, Workload(concurrency=2, requests=4))
    finally:
        await runner.cleanup()
    assert (result.output_tokens, result.prompt_tokens) == (4 * 64, 4 * 127)
    assert result.output_tokens_per_s == pytest.approx(4 * 64 / result.seconds)


def test_ratios_are_taken_within_a_turn_and_to_the_best_peer() -> None:
    speeds = {1: {"worker-paged": 120.0, "worker-paged int8": 500.0, "a": 100.0, "b": 60.0},
              2: {"worker-paged": 60.0, "a": 30.0, "b": 40.0},
              3: {"a": 30.0, "b": 40.0}}  # fmt: skip
    rows = [
        {"turn": turn, "workload": "8 streams", "peer": peer, "output_tokens_per_s": speed}
        for turn, found in speeds.items()
        for peer, speed in found.items()
    ]
    assert side_by_side.ratios(rows, "8 streams") == pytest.approx([1.2, 1.5])


def test_rotary_halves_become_pairs_in_a_gguf_file() -> None:
    rows = np.arange(2 * 8)[:, None] * np.ones((1, 3))  # 2 heads of 8 rows, each row holds its number
    paired = gguf_file._paired(rows, heads=2)
    assert paired[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


async def test_a_measurement_becomes_a_row_of_the_tables() -> None:
    runner, url = await serve(64)
    try:
        result = await load.run(url, "model", ["text"] * 4, Workload(concurrency=2, requests=4))
    finally:
        await runner.cleanup()
    seen = Disturbance(share=0.01, server_cpu_s=0.5)
    rows = [side_by_side.row(name, "8 streams", 1, result, seen, rss_bytes=2**20) for name in ("worker-paged", "a")]
    about = {name: {"version": "1", "start_s": 2.0, "idle_share": 0.0} for name in ("worker-paged", "a")}
    text = side_by_side.tables(rows, about)
    assert "| **worker-paged / best peer** | 1.00 (1.00-1.00) |" in text
    assert "| a | 1 | 2.0 | 1 | 0.0% |" in text
