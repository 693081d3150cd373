"""Child processes that leave nothing behind: each in a session of its own, ended together with all it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence

import psutil

# A line longer than this is cut: it is for a person to read.
_MAX_LINE_BYTES = 1024 * 1024
_KILLED_WITHIN_S = 3.0


class Child:
    """A process and its descendants. A terminal's Ctrl-C does not reach them."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.Task[None], stdin: int | None) -> None:
        self._process = process
        self._reader = reader
        self._stdin = stdin
        self._family: set[psutil.Process] = set()
        self._gone = False

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str], None],
        *,
        talks: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """`on_line` gets every line of output. With `talks`, `send` writes to its stdin and its stderr is ours.

        The pipes are made here: asyncio's own would keep `wait` waiting while any descendant holds them open.
        """
        output, its_output = os.pipe()
        its_stdin, stdin = os.pipe() if talks else (asyncio.subprocess.DEVNULL, None)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environ,
                stdin=its_stdin,
                stdout=its_output,
                stderr=None if talks else asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        finally:
            os.close(its_output)
            if talks:
                os.close(its_stdin)
        return cls(process, asyncio.create_task(_read_lines(output, on_line)), stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """The exit code, once the process has ended and its last lines are read."""
        code = await self._process.wait()
        # Descendants may hold the pipe open for longer; their lines are not waited for.
        await asyncio.wait((self._reader,), timeout=0.5)
        return code

    def send(self, line: str) -> None:
        """Writes a line to its stdin; nothing happens where it has ended."""
        if self._stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._stdin, line.encode() + b"\n")

    def remember_family(self) -> None:
        """Notes its descendants of this moment: once it has died, nothing says any more that they were its own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family.update(psutil.Process(self.pid).children(recursive=True))

    async def stop(self, grace_s: float) -> None:
        """SIGTERM; after `grace_s` seconds SIGKILL. Returns when it and all its descendants are gone."""
        if self.returncode is None:
            self.remember_family()
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL to whatever is left of its group and its descendants."""
        if self._gone:
            return
        if self.returncode is None:
            self.remember_family()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for member in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        await self._process.wait()
        await asyncio.to_thread(psutil.wait_procs, list(self._family), timeout=_KILLED_WITHIN_S)
        self._gone = True
        self._reader.cancel()
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None


async def _read_lines(output: int, on_line: Callable[[str], None]) -> None:
    lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(lines)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(output, "rb"))
    try:
        while True:
            try:
                line = await lines.readline()
            except ValueError:
                continue  # too long: dropped
            if not line:
                return
            on_line(line.decode("utf-8", "replace").rstrip())
    finally:
        transport.close()
