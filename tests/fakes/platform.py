"""The two POSTs that the SDK makes for a job, taken by a real HTTP server on a free port.

The SDK's URLs, unset, are relative words; a session with a base address turns them into paths of this server.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

import aiohttp
from aiohttp import web


class Platform:
    """`chunks` and `done` hold the bodies POSTed so far; `post_s` is how long an answer to a chunk takes."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.done: list[Any] = []
        self.post_s = 0.0

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{path:.*}", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.session = aiohttp.ClientSession(base_url=f"http://127.0.0.1:{port}/")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self._runner.cleanup()

    async def run(self, handler: Any, job_input: Any, job_id: str = "job-1") -> dict[str, Any] | None:
        """Runs a job as the SDK does; what the job-done POST said."""
        from runpod.serverless.modules.rp_job import handle_job

        before = len(self.done)
        config = {"handler": handler, "return_aggregate_stream": True}
        await handle_job(self.session, config, {"id": job_id, "input": job_input})
        return self.done[-1] if len(self.done) > before else None

    async def _take(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read(), parse_constant=_refuse)
        if request.path.startswith("/JOB_STREAM_URL"):
            self.chunks.append(body)
            await asyncio.sleep(self.post_s)
        else:
            self.done.append(body)
        return web.Response()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
