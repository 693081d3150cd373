"""Where a model's files are: a folder, a cache of the Hugging Face hub, or the hub itself, in that order.

    locate("org/name", revision="main", caches=[...])   ->  the folder with config.json and all weights

A model whose files are all there is never asked about on the network. Caches are searched without regard to case:
RunPod's model cache lower-cases names. Knows nothing of what is in the files.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

log = logging.getLogger("worker")

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "additional_chat_templates/*"]
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Subfolders hold other formats of the same weights.
OTHER_FORMATS = ["original/*", "onnx/*", "gguf/*", "openvino/*"]
PROGRESS_EVERY_S = 10.0
Needs = Literal["weights", "config", "tokenizer"]


class ModelNotFound(Exception):
    """The model cannot be had. The message is one line for the operator, naming the model and a way out."""


def as_path(text: str) -> Path:
    """With ~ for a home folder; that of nobody stays as it is written, where Path.expanduser raises."""
    return Path(os.path.expanduser(text))


def locate(
    name: str,
    *,
    revision: str | None = None,
    caches: Sequence[Path] = (),
    download_to: Path | None = None,
    token: str | None = None,
    offline: bool = False,
    needs: Needs = "weights",
) -> Path:
    """The folder of a model. `needs`: what must be there; of less than "weights" only the small files are downloaded.

    `caches`: folders with models--org--name in them, searched in order. `download_to`: the cache that a download goes
    to; None = the hub library's own. Raises ModelNotFound.
    """
    folder = as_path(name)
    if os.path.isdir(folder):  # false, too, for what can be no path
        if missing := missing_files(folder, needs):
            raise ModelNotFound(f"the folder '{name}' has no {missing}")
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith((".", "/")):
        raise ModelNotFound(f"'{name}' is neither a folder here nor a name on the hub (organisation/model)")
    for snapshot in cached_snapshots(name, revision, caches):
        if not missing_files(snapshot, needs):
            return snapshot
    if offline:
        raise ModelNotFound(f"'{name}' is not complete in any local cache, and HF_HUB_OFFLINE forbids a download")
    return _download(name, revision, download_to, token, needs)


def cached_snapshots(name: str, revision: str | None, caches: Sequence[Path]) -> list[Path]:
    """The snapshots of `name` that a cache has for `revision`; without one, those of main, or else the newest."""
    wanted = "models--" + name.replace("/", "--").lower()
    found = []
    for cache in caches:
        for repo in sorted(_subfolders(cache)):
            if repo.name.lower() == wanted:
                found += _snapshots(repo, revision)
    return found


def missing_files(folder: Path, needs: Needs) -> str | None:
    """The first file that a model's folder should have and has not. Links into nothing count as missing."""
    if needs == "tokenizer":
        known = (folder / "tokenizer.json", *folder.glob("*.model"), *folder.glob("*.tiktoken"))
        return None if any(file.exists() for file in known) else "tokenizer.json"
    if not (folder / "config.json").exists():
        return "config.json"
    if needs == "config":
        return None
    for index in WEIGHT_INDEXES:
        if (folder / index).exists():
            return next((shard for shard in _shards(folder / index) if not (folder / shard).exists()), None)
    if not any(file.exists() for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)):
        return "weights (*.safetensors, *.bin)"
    return None


def _snapshots(repo: Path, revision: str | None) -> list[Path]:
    reference = repo / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    if commit is not None:
        folder = repo / "snapshots" / commit
        return [folder] if folder.is_dir() else []
    return sorted(_subfolders(repo / "snapshots"), key=lambda folder: folder.stat().st_mtime, reverse=True)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _shards(index: Path) -> list[str]:
    try:
        document: Any = orjson.loads(index.read_bytes())
        return sorted(set(document["weight_map"].values()))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ModelNotFound(f"{index.name} of the model is not a valid index of weights") from None


def _download(name: str, revision: str | None, cache: Path | None, token: str | None, needs: Needs) -> Path:
    # Imported here: most starts find their files on disk and never need the library.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    started = time.monotonic()
    done = threading.Event()
    try:
        threading.Thread(target=_tell_progress, args=(name, cache, done), daemon=True).start()
        patterns = list(SMALL_FILES)
        if needs == "weights":
            files = HfApi(token=token).list_repo_files(name, revision=revision)
            patterns.append("*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin")
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache,
            allow_patterns=patterns,
            ignore_patterns=OTHER_FORMATS,
        )
    except GatedRepoError:
        hint = "HF_TOKEN has no access to it" if token else "set HF_TOKEN to a token that has access"
        raise ModelNotFound(f"'{name}' is gated on the hub: {hint}") from None
    except RevisionNotFoundError:
        wanted = revision or "main"
        raise ModelNotFound(f"'{name}' has no revision '{wanted}' on the hub") from None
    except RepositoryNotFoundError:
        hint = "" if token else " (a private model needs HF_TOKEN)"
        raise ModelNotFound(f"'{name}' is neither a folder here nor a model on the hub{hint}") from None
    except Exception as error:  # the library's errors of the network have no common base
        raise ModelNotFound(f"'{name}' could not be downloaded: {type(error).__name__}") from None
    finally:
        done.set()
    log.info("downloaded %s in %.1f s", name, time.monotonic() - started)
    return Path(folder)


def _tell_progress(name: str, cache: Path | None, done: threading.Event) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = (cache or Path(HF_HUB_CACHE)) / ("models--" + name.replace("/", "--"))
    while not done.wait(PROGRESS_EVERY_S):
        total = sum(_size(Path(root, file)) for root, _, files in os.walk(folder / "blobs") for file in files)
        log.info("downloading %s: %.1f GB so far", name, total / 1e9)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # renamed meanwhile
        return 0
