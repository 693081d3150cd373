"""The gateway's process: uvicorn on a socket that the supervisor has opened, and a line of talk with the supervisor.

Lines of JSON. Supervisor to gateway, on stdin:
    {"started": "<worker id>", "pid": int}      a worker's process, leader of a group of its own
    {"exited": "<worker id>", "clean": bool}    it has ended
    {"drain": true}                             the end is near: end all jobs, stop them on the workers
Gateway to supervisor, on stdout:
    {"ready": "<worker id>"}                    a worker polls for the first time
    {"drained": true}                           all stops have been delivered
When stdin closes, the supervisor is gone: the gateway leaves too, and ends the workers that nobody watches now.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

import uvicorn

from gateway.app import build
from gateway.broker import Broker
from gateway.http import Http
from worker.settings import GatewaySettings

SECRET_VARIABLE = "WORKER_PAGED_SECRET"
# The SDK's HTTP client keeps idle connections for 15 s. Were they closed here first, a post could meet the closing
# connection, and the SDK does not repeat a post that was cut off.
KEEP_ALIVE_S = 75
SWEEP_S = 2.0
ORPHAN_GRACE_S = 2.0


def tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def make_server(broker: Broker, settings: GatewaySettings, secret: str) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            build(settings, broker, secret),
            http=Http,
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            ws="none",
            proxy_headers=False,
        )
    )


async def run(server: uvicorn.Server, broker: Broker, listening: socket.socket) -> None:
    commands = asyncio.create_task(_obey(broker, server))
    sweeper = asyncio.create_task(_sweep(broker))
    try:
        await server.serve(sockets=[listening])
    finally:
        commands.cancel()
        sweeper.cancel()


async def _obey(broker: Broker, server: uvicorn.Server) -> None:
    lines = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    pids: dict[str, int] = {}
    async for line in lines:
        command = json.loads(line)
        if "started" in command:
            pids[command["started"]] = command["pid"]
        elif "exited" in command:
            pids.pop(command["exited"], None)
            broker.worker_gone(command["exited"], clean=command["clean"])
        elif "drain" in command:
            broker.drain()
            while any(worker.unsent_stops for worker in broker.workers.values()):
                await asyncio.sleep(0.02)
            tell({"drained": True})
    broker.drain()
    for number, pause_s in ((signal.SIGTERM, ORPHAN_GRACE_S), (signal.SIGKILL, 0)):
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        await asyncio.sleep(pause_s if pids else 0)
    server.should_exit = True


async def _sweep(broker: Broker) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        broker.sweep()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--fd", type=int, required=True, help="file descriptor of the listening socket")
    listening = socket.socket(fileno=arguments.parse_args().fd)
    logging.basicConfig(level=logging.WARNING, format="gateway: %(message)s", stream=sys.stderr)
    settings = GatewaySettings.from_env(os.environ)
    broker = Broker(max_queued=settings.max_queued_jobs, on_worker=lambda worker_id: tell({"ready": worker_id}))
    server = make_server(broker, settings, os.environ[SECRET_VARIABLE])
    # uvloop where it is installed.
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run(server, broker, listening))


if __name__ == "__main__":
    main()
