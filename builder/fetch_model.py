"""Bakes a model into an image: downloads it at build time, so that a cold start reads only local files.

    python -m builder.fetch_model --into /models        with MODEL_NAME [MODEL_REVISION, HF_TOKEN] set

Writes the snapshot to <into>/<org>--<name> and prints that folder. A local folder as MODEL_NAME is checked and
left where it is. Only what the worker reads is downloaded: one format of the
weights (safetensors if there is one), configs, tokenizer files and chat templates.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "additional_chat_templates/*"]


class FetchError(RuntimeError):
    """The model cannot be had. The message is one clear line."""


def fetch(name: str, into: Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """The local folder of model `name`. Raises FetchError."""
    if (Path(name) / "config.json").exists():
        return Path(name)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        files = HfApi(token=token).list_repo_files(name, revision=revision)
        weights = ["*.safetensors"] if any(file.endswith(".safetensors") for file in files) else ["*.bin"]
        folder = into / name.replace("/", "--")
        # Subfolders hold other formats of the same weights (original/, onnx/): leave them out.
        snapshot_download(
            name,
            revision=revision,
            token=token,
            local_dir=folder,
            allow_patterns=SMALL_FILES + weights,
            ignore_patterns=["original/*", "onnx/*", "gguf/*"],
        )
    except GatedRepoError:
        hint = "HF_TOKEN has no access to it" if token else "set HF_TOKEN to a token that has access"
        raise FetchError(f"model '{name}' is gated: {hint}") from None
    except RepositoryNotFoundError:
        hint = "" if token else " (a private model needs HF_TOKEN)"
        raise FetchError(f"model '{name}' does not exist on the hub{hint}") from None
    except (HfHubHTTPError, OSError) as error:
        raise FetchError(f"model '{name}' could not be downloaded: {type(error).__name__}") from None
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="download MODEL_NAME at image build time")
    parser.add_argument("--into", type=Path, default=Path("/models"), help="parent folder of the snapshot")
    arguments = parser.parse_args()
    name = os.environ.get("MODEL_NAME", "").strip()
    if not name:
        sys.exit("error: MODEL_NAME is not set")
    try:
        folder = fetch(
            name,
            arguments.into,
            revision=os.environ.get("MODEL_REVISION") or None,
            token=os.environ.get("HF_TOKEN") or None,
        )
    except FetchError as error:
        sys.exit(f"error: {error}")
    print(folder)


if __name__ == "__main__":
    main()
