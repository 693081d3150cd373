"""The worker's end of the engine process. Torch-free.

`EngineProcess` starts, awaits and stops the process: plain blocking code without threads or sockets, so that the
caller may still fork afterwards. `EngineClient` talks to it from inside one event loop:

    stream = client.submit(request)        # registers the listener, then sends
    async for output in stream: ...        # SequenceOutputs; the last one has `finish` set
    client.abort(request.id)               # at any time, any number of times, also for what has ended

Every stream ends with exactly one final output, also when the engine process dies or the client is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from engine.messages import (
    Abort,
    Command,
    EngineConfig,
    EngineInfo,
    FinishReason,
    GetStats,
    Handover,
    Progress,
    Request,
    RequestError,
    ResetPrefixCache,
    SequenceOutput,
    StartFailed,
    Stats,
    StepOutput,
)
from engine.stream import RequestStream, deliver

__all__ = ["EngineClient", "EngineDead", "EngineProcess", "EngineStartError", "RequestStream"]

ROOT = Path(__file__).parents[1]  # so that `python -m engine.process` finds the package from any directory
MESSAGES_A_TURN = 100  # handled before other callbacks of the loop get their turn
CLOSE_LINGER_MS = 1000  # for the last aborts to leave, in the background


class EngineStartError(Exception):
    """The engine could not start. The message is one clear line."""


class EngineDead(Exception):
    """The engine process is gone."""


class EngineProcess:
    """The process from outside. Its stdin and status pipe tie the two lives together; see messages.Handover."""

    def __init__(self, popen: subprocess.Popen[bytes], status_fd: int, handover: Handover) -> None:
        self._popen = popen
        self._status = os.fdopen(status_fd, "rb")
        self._socket_dir = handover.socket_dir
        self.address = handover.address
        self.pid = popen.pid
        _processes.add(self)

    @classmethod
    def launch(cls, config: EngineConfig, module: str = "engine.process") -> EngineProcess:
        """Starts `python -m module` and returns at once."""
        status_read, status_write = os.pipe()
        socket_dir = tempfile.mkdtemp(prefix="worker-paged-")  # mode 0700: the socket in it is ours alone
        handover = Handover(config, socket_dir, status_write, logging.getLogger().getEffectiveLevel())
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        popen = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            pass_fds=[status_write],
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
        )
        os.close(status_write)
        assert popen.stdin is not None
        with suppress(BrokenPipeError):  # dead already: wait_ready says so
            popen.stdin.write(pickle.dumps(handover))
        return cls(popen, status_read, handover)

    def wait_ready(self, on_progress: Callable[[str], None] | None = None) -> EngineInfo:
        """Blocks until the model is loaded. Raises EngineStartError."""
        while True:
            try:
                message = pickle.load(self._status)
            except (EOFError, pickle.UnpicklingError):
                code = self._popen.wait()
                self.stop()
                raise EngineStartError(f"the engine process ended while starting ({_exit(code)})") from None
            match message:
                case Progress(line):
                    if on_progress is not None:
                        on_progress(line)
                case StartFailed(line):
                    self.stop()
                    raise EngineStartError(line)
                case EngineInfo():
                    return message

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def status_fd(self) -> int:
        """After wait_ready, readable = the process is gone."""
        return self._status.fileno()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Asks it to end, kills it after `timeout_s`, leaves nothing behind. May be called again."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        self.release()
        self._status.close()

    def release(self) -> None:
        """The process is over: remove its socket."""
        shutil.rmtree(self._socket_dir, ignore_errors=True)
        self.let_go()

    def let_go(self) -> None:
        """Close the pipe whose end tells the engine that this process is gone."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()


# A forked child (the SDK's ping process) must not keep the engine alive after its parent has died.
_processes: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for process in list(_processes):
        process.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


class EngineClient:
    """Create it inside the running loop; it belongs to that loop. `dead` is set when the process is gone."""

    def __init__(self, process: EngineProcess, info: EngineInfo) -> None:
        self.info = info
        self.dead = asyncio.Event()
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, RequestStream] = {}
        self._replies: deque[asyncio.Future[Any]] = deque()  # the engine answers in order
        # The process-wide context: one of our own would block where it is collected before its socket is closed.
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(process.address)
        self._socket_fd = int(self._socket.fd)
        self._status_fd = os.dup(process.status_fd())  # our own: stop() closes the other
        self._loop.add_reader(self._socket_fd, self._receive)
        self._loop.add_reader(self._status_fd, self._on_death)

    def submit(self, request: Request) -> RequestStream:
        """Never raises: a refusal, too, is the stream's final output."""
        self._check_loop()
        stream = RequestStream(request.id)
        if self._is_over():
            stream.put(_final(request.id, "engine_dead", "The engine is not running."))
        elif request.id in self._streams:
            stream.put(_final(request.id, "duplicate_id", f"A request with the id {request.id!r} is running already."))
        else:
            self._streams[request.id] = stream
            self._send(request)
        return stream

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._send(Abort(request_id))

    async def stats(self) -> Stats:
        """Raises EngineDead."""
        stats: Stats = await self._ask(GetStats())
        return stats

    async def reset_prefix_cache(self) -> None:
        """Raises EngineDead."""
        await self._ask(ResetPrefixCache())

    async def close(self) -> None:
        """Aborts what is open and leaves the process alone."""
        for request_id in self._streams:
            self._send(Abort(request_id))
        self._end(lambda request_id: SequenceOutput(request_id, finish=FinishReason.ABORT))
        if not self._socket.closed:
            self._loop.remove_reader(self._socket_fd)
            self._loop.remove_reader(self._status_fd)
            os.close(self._status_fd)
            self._socket.close(linger=0 if self.dead.is_set() else CLOSE_LINGER_MS)

    def _is_over(self) -> bool:
        return self.dead.is_set() or self._socket.closed

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this engine client belongs to another event loop")

    def _send(self, command: Command) -> None:
        self._socket.send(pickle.dumps(command, pickle.HIGHEST_PROTOCOL), zmq.NOBLOCK)
        # The socket's fd signals edges only, and sending may have swallowed one.
        self._loop.call_soon(self._receive)

    async def _ask(self, command: Command) -> Any:
        self._check_loop()
        if self._is_over():
            raise EngineDead("The engine is not running.")
        reply = self._loop.create_future()
        self._replies.append(reply)
        self._send(command)
        return await reply

    def _receive(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(pickle.loads(frame))
        self._loop.call_soon(self._receive)

    def _dispatch(self, message: StepOutput | Stats | ResetPrefixCache) -> None:
        if isinstance(message, StepOutput):
            deliver(message, self._streams)
        elif not (reply := self._replies.popleft()).done():
            reply.set_result(message)

    def _on_death(self) -> None:
        self._loop.remove_reader(self._status_fd)
        self._receive()  # what it said last
        self.dead.set()
        self._process.release()
        self._end(lambda request_id: _final(request_id, "engine_dead", "The engine process ended unexpectedly."))

    def _end(self, final: Callable[[str], SequenceOutput]) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.put(final(request_id))
        while self._replies:
            reply = self._replies.popleft()
            if not reply.done():
                reply.set_exception(EngineDead("The engine is not running."))


def _final(request_id: str, code: str, message: str) -> SequenceOutput:
    return SequenceOutput(request_id, finish=FinishReason.ERROR, error=RequestError(code, message))


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}; 9 often means out of memory"
