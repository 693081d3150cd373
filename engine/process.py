"""The engine process: `python -m engine.process`, started by engine.client.EngineProcess.launch.

Loads the model, says so on the status pipe, then turns the crank of EngineCore: sleeps on its socket while there is
no work, steps while there is. It ends

    by SIGTERM               between two steps, exit code 0
    when its parent is gone  at once, even in the middle of a forward pass
    by any exception         loudly: traceback on stderr, exit code 1; the client fails every open request

Importing this module imports no torch: the runner is imported by `main`, once the handover is read.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from time import monotonic, perf_counter
from typing import NoReturn

import zmq

from engine.core import EngineCore, Message
from engine.grammar import Grammar, GrammarCompiler
from engine.messages import Command, EngineConfig, EngineInfo, GrammarSpec, Handover, Progress, StartFailed
from engine.running import Runner
from engine.threads import before_torch

log = logging.getLogger("engine")

# Idle for so long, the engine gives freed memory back to the system: a few ms that nobody waits for.
_TRIM_AFTER_S = 1.0

MakeRunner = Callable[[EngineConfig, Callable[[str], None]], Runner]


class Link:
    """The socket to the worker, and the wish of SIGTERM to end. Answers go to the client that spoke last: one that
    was left behind by an event loop that is over must not take any away from its successor."""

    def __init__(self, address: str) -> None:
        self.stopping = False
        self._client = b""
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # never blocks: what is under way is bounded by max_tokens of the open requests
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        # A signal handler cannot end a poll by itself (PEP 475), a byte in a polled pipe can.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGTERM, self._stop)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleeps until there is a command, a signal, or `wake` has been called; or the time is over."""
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000))
        if any(ready == self._wake_read for ready, _ in self._poller.poll(timeout_ms)):
            os.read(self._wake_read, 4096)

    def wake(self) -> None:
        """From any thread."""
        with suppress(BlockingIOError):  # full of earlier calls
            os.write(self._wake_write, b"!")

    def receive(self) -> list[Command]:
        """The commands that have arrived, without waiting."""
        commands: list[Command] = []
        while True:
            try:
                self._client, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            commands.append(pickle.loads(frame))

    def send(self, messages: list[Message]) -> None:
        for message in messages:  # dropped by the socket if the client is gone
            self._socket.send_multipart([self._client, pickle.dumps(message, pickle.HIGHEST_PROTOCOL)], zmq.NOBLOCK)


def run(core: EngineCore, link: Link) -> None:
    """Steps while there is work, sleeps while there is none, until SIGTERM."""
    trim_at: float | None = None  # when to give memory back; None = nothing has been computed since
    while not link.stopping:
        if core.has_work:
            trim_at = monotonic() + _TRIM_AFTER_S
        elif trim_at is None:
            link.wait()
        elif (remaining_s := trim_at - monotonic()) > 0:
            link.wait(remaining_s)
        else:
            _give_memory_back()
            trim_at = None
        link.send(core.step())


def _give_memory_back() -> None:
    """Steps of ever new sizes leave holes in the heap, which the C library keeps until it is told."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def main(make_runner: MakeRunner) -> NoReturn:
    """The life of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    handover: Handover = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_leave_with_parent, args=(handover.socket_dir,), daemon=True).start()
    logging.basicConfig(level=handover.log_level, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    os.set_inheritable(handover.status_fd, False)

    def say(message: Progress | StartFailed | EngineInfo) -> None:
        with suppress(BrokenPipeError):  # the parent is gone, and so shall we be in a moment
            os.write(handover.status_fd, pickle.dumps(message))

    try:
        _check(handover.config)
        runner = make_runner(handover.config, lambda line: say(Progress(line)))
        link = Link(handover.address)
        core = EngineCore(handover.config, runner, _grammars(handover.config, runner, link), link.receive)
    except BaseException as failure:
        log.debug("the engine could not start", exc_info=True)
        say(StartFailed(_one_line(failure)))
        _leave(handover.socket_dir, 1)
    gc.collect()
    gc.freeze()  # the model's objects stay: no need to walk them again and again between steps
    say(_engine_info(handover.config, runner))
    try:
        run(core, link)
    except BaseException:
        traceback.print_exc()
        _leave(handover.socket_dir, 1)
    _leave(handover.socket_dir, 0)


def _check(config: EngineConfig) -> None:
    """With these, nothing would ever be computed."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_queued"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)}")


def _leave_with_parent(socket_dir: str) -> None:
    """Runs in a thread of its own, since the main one may be in a long forward pass."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    _leave(socket_dir, 1)


def _leave(socket_dir: str, code: int) -> NoReturn:
    """No teardown of the interpreter: a broken device, or threads of a library, could keep it from ending."""
    shutil.rmtree(socket_dir, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _grammars(config: EngineConfig, runner: Runner, link: Link) -> Callable[[GrammarSpec], Future[Grammar]]:
    """Compiles grammars in the background; the tokenizer is read with the first, most workers never see one."""
    compiler = GrammarCompiler(config.tokenizer_path or config.model_path, runner.info.vocab_size)

    def compile_grammar(spec: GrammarSpec) -> Future[Grammar]:
        future = compiler.submit(spec)
        future.add_done_callback(lambda _: link.wake())
        return future

    return compile_grammar


def _engine_info(config: EngineConfig, runner: Runner) -> EngineInfo:
    info = runner.info
    return EngineInfo(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        page_size=info.page_size,
        num_pages=info.num_pages,
        device=info.device,
        dtype=info.dtype,
        attention_backend=info.attention_backend,
        max_num_seqs=config.max_num_seqs,
        load_s=dict(info.load_s),
    )


def _one_line(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    expected = isinstance(failure, (OSError, ValueError, NotImplementedError)) and text
    line = text if expected else f"{type(failure).__name__}: {text}"
    return line if len(line) <= 500 else line[:499] + "…"


def _model_runner(config: EngineConfig, progress: Callable[[str], None]) -> Runner:
    start = perf_counter()
    progress("importing torch")
    before_torch()
    runner_module = import_module("engine.runner")  # by name: the checked part of engine/ ends here
    import_s = perf_counter() - start
    runner: Runner = runner_module.Runner(config, progress)
    runner.info.load_s.setdefault("import", import_s)
    return runner


if __name__ == "__main__":
    main(_model_runner)
