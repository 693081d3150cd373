"""What `make serve` runs: the gateway and a worker, started, watched and ended together.

    supervisor ── gateway      (the socket is opened here, so that a port in use is told at once)
               └─ worker       (handler.py under the unmodified SDK) ── engine, the SDK's ping process

A worker that ends after it was ready is started again, after a growing pause. One that never gets ready ends it all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from builder import demo_model
from gateway import console
from gateway.children import Child
from gateway.console import Console
from gateway.env_file import read_env_file
from gateway.listening import Failed, open_socket, origin_of, reachable
from gateway.sdk_environment import importable, worker_environment
from gateway.server import SECRET_VARIABLE
from worker.errors import SettingsError
from worker.settings import GatewaySettings

ROOT = Path(__file__).parents[1]
WORKER_GRACE_S = 5.0
GATEWAY_GRACE_S = 3.0
DRAIN_WITHIN_S = 1.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_AFTER_S = 60.0  # a worker that lasts so long starts the pauses anew
MAX_FAILED_STARTS = 4  # in a row, of a worker that had been ready before


class Supervisor:
    def __init__(self, settings: GatewaySettings, handler: Path) -> None:
        self._settings = settings
        self._handler = handler
        self._console = Console()
        self._secret = secrets.token_urlsafe(24)
        self._gateway: Child | None = None
        self._worker: Child | None = None
        self._starts = 0
        self._ready: dict[str, asyncio.Event] = {}
        self._drained = asyncio.Event()
        self._announcing: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Serves until `stop`. Raises Failed. Whatever happens, nothing is left behind; `hurry` cuts the manners."""
        try:
            listening = open_socket(self._settings.host, self._settings.port)
            self._origin = origin_of(listening)
            stopped = asyncio.create_task(stop.wait())
            serving = asyncio.create_task(self._serve(listening))
            await asyncio.wait((stopped, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
            serving.cancel()
            await asyncio.wait((serving,))
        finally:
            polite = asyncio.create_task(self._shut_down())
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait((polite, hurried), return_when=asyncio.FIRST_COMPLETED)
            polite.cancel()
            for child in (self._worker, self._gateway):
                if child is not None:
                    await child.kill()

    async def _serve(self, listening: socket.socket) -> None:
        """Never returns: raises Failed in the end."""
        await self._prepare_model()
        await self._start_gateway(listening)
        assert self._gateway is not None
        gateway = asyncio.create_task(self._gateway.wait())
        worker = asyncio.create_task(self._keep_worker())
        try:
            await asyncio.wait((gateway, worker), return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                await worker
            raise Failed(f"the gateway ended (exit code {await gateway})")
        finally:
            gateway.cancel()
            worker.cancel()

    async def _prepare_model(self) -> None:
        """Without MODEL_NAME the real handler serves the demo model. Making it takes torch, so not in this process."""
        if os.environ.get("MODEL_NAME", "").strip() or self._handler != ROOT / "handler.py":
            return
        folder = demo_model.path()
        if not (folder / "config.json").exists():
            command = [sys.executable, "-m", "builder.demo_model"]
            self._worker = await Child.start(command, importable(os.environ, ROOT), self._console.from_child)
            if await self._worker.wait() != 0:
                raise Failed(self._console.reason or "the demo model could not be made")
        os.environ["MODEL_NAME"] = str(folder)

    async def _start_gateway(self, listening: socket.socket) -> None:
        command = [sys.executable, "-m", "gateway.server", "--fd", str(listening.fileno())]
        environ = importable({**os.environ, SECRET_VARIABLE: self._secret}, ROOT)
        self._gateway = await Child.start(
            command, environ, self._from_gateway, talks=True, pass_fds=[listening.fileno()]
        )
        listening.close()
        self._console.progress(f"gateway at {self._origin}")

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._gateway is not None
        self._gateway.send(json.dumps(message))

    def _from_gateway(self, line: str) -> None:
        told = json.loads(line)
        if "ready" in told:
            self._ready.setdefault(told["ready"], asyncio.Event()).set()
        elif "drained" in told:
            self._drained.set()

    async def _keep_worker(self) -> None:
        failed_starts, pause_s = 0, FIRST_PAUSE_S
        ever_ready = False
        loop = asyncio.get_running_loop()
        while True:
            worker_id, worker = await self._start_worker()
            was_ready = await self._until_ready(worker_id, worker)
            ready_at = loop.time()
            if was_ready:
                worker.remember_family()
                if ever_ready:
                    self._console.ready("the worker is ready again")
                else:
                    self._announcing = asyncio.create_task(self._announce())
                failed_starts, ever_ready = 0, True
            code = await worker.wait()
            self._tell({"exited": worker_id, "clean": code == 0})
            await worker.kill()
            if not was_ready:
                failed_starts += 1
                if not ever_ready or failed_starts >= MAX_FAILED_STARTS:
                    raise Failed(self._console.reason or f"the worker ended before it was ready ({_ended(code)})")
            elif loop.time() - ready_at > STEADY_AFTER_S:
                pause_s = FIRST_PAUSE_S
            reason = f": {self._console.reason}" if self._console.reason else ""
            self._console.starting()
            self._console.progress(f"the worker ended ({_ended(code)}){reason}; starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    async def _start_worker(self) -> tuple[str, Child]:
        self._starts += 1
        worker_id = f"local-{self._starts}"
        self._ready[worker_id] = asyncio.Event()
        environ = worker_environment(importable(os.environ, ROOT), reachable(self._origin), self._secret, worker_id)
        # -P: the project is on the path already, and files beside the script must not hide the standard library's.
        command = [sys.executable, "-P", "-u", str(self._handler)]
        self._worker = await Child.start(command, environ, self._console.from_child)
        self._tell({"started": worker_id, "pid": self._worker.pid})
        return worker_id, self._worker

    async def _until_ready(self, worker_id: str, worker: Child) -> bool:
        """True when it polls for jobs, false when it has ended before."""
        ready = asyncio.create_task(self._ready[worker_id].wait())
        ended = asyncio.create_task(worker.wait())
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        was_ready = ready.done()
        ready.cancel()
        ended.cancel()
        return was_ready

    async def _announce(self) -> None:
        """Says that it is ready, after one request has gone all the way."""
        model = await asyncio.to_thread(self._first_model)
        text = console.ready_text(
            reachable(self._origin), model, self._console.seconds(), with_key=self._settings.api_key is not None
        )
        self._console.ready(text)

    def _first_model(self) -> str:
        request = urllib.request.Request(f"{reachable(self._origin)}/v1/models")
        if self._settings.api_key is not None:
            request.add_header("Authorization", f"Bearer {self._settings.api_key}")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=60) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            self._console.progress(f"warning: the worker does not list its model ({type(error).__name__})")
            return "default"

    async def _shut_down(self) -> None:
        """Stops accepting, stops what runs, ends the worker, then the gateway."""
        if self._gateway is not None and self._worker is not None and self._worker.returncode is None:
            self._console.progress("shutting down")
            self._tell({"drain": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_WITHIN_S):
                    await self._drained.wait()
        if self._worker is not None:
            await self._worker.stop(WORKER_GRACE_S)
        if self._gateway is not None:
            await self._gateway.stop(GATEWAY_GRACE_S)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


async def serve(handler: Path) -> int:
    """Exit code: 0 after a signal, 1 after a failure."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def asked_to_stop() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop)
    try:
        settings = GatewaySettings.from_env(os.environ)
        await Supervisor(settings, handler).run(stop, hurry)
    except (Failed, SettingsError) as error:
        console.error(str(error))
        return 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="gateway.supervisor", description="Serve a model on this machine.")
    parser.add_argument("--handler", type=Path, default=ROOT / "handler.py", help="the worker's script")
    parser.add_argument("--env-file", type=Path, default=Path(".env"), help="settings; those of the environment win")
    arguments = parser.parse_args()
    try:
        read_env_file(arguments.env_file, os.environ)
    except SettingsError as error:
        console.error(str(error))
        sys.exit(1)
    sys.exit(asyncio.run(serve(arguments.handler.resolve())))


if __name__ == "__main__":
    main()
