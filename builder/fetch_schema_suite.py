"""The public JSON-Schema-Test-Suite, for tests: fetched from a PyPI source package, never part of this repository.

The source package of `jsonschema` carries the suite in its folder json/tests. It is downloaded once (0.4 MB) and only
the drafts that tests use are kept, in the user's cache.

    python -m builder.fetch_schema_suite        prints the folder, fetching it first if need be
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "jsonschema==4.26.0"
DRAFTS = ("draft7", "draft2020-12")


class FetchError(RuntimeError):
    """The suite could not be fetched. The message is one clear line."""


def path() -> Path:
    """The folder of the suite, whether it exists or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "worker-paged" / "json-schema-suite" / PACKAGE.replace("==", "-")


def ensure() -> Path:
    """The folder with one folder of *.json a draft, fetched now if it is not there. Raises FetchError."""
    folder = path()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        made = Path(scratch) / "suite"
        _extract(_download(Path(scratch)), made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another start was faster, and its folder is as good
                raise FetchError(f"cannot write the suite to {folder}") from None
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
            parts = Path(member.name).parts
            if member.isfile() and len(parts) == 5 and parts[1:3] == ("json", "tests") and parts[3] in DRAFTS:
                source = package.extractfile(member)
                assert source is not None
                file = folder / parts[3] / parts[4]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(source.read())
    if not folder.is_dir():
        raise FetchError(f"{PACKAGE} has no json/tests")


if __name__ == "__main__":
    try:
        print(ensure())
    except FetchError as error:
        sys.exit(f"error: {error}")
