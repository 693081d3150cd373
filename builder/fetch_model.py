"""Bakes a model into an image: downloads it at build time, so that a cold start reads only local files.

    MODEL_NAME=org/name python -m builder.fetch_model       also read: MODEL_REVISION, HF_TOKEN, HF_HOME

The files go to the hub library's own cache (HF_HOME), where the worker looks before it asks the hub. A model that is
there already, or a local folder, is only checked. Prints the folder; a model that cannot be had is one clear line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from worker.hub import ModelNotFound, locate


def main() -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    name = os.environ.get("MODEL_NAME", "").strip()
    if not name:
        sys.exit("error: MODEL_NAME is not set")
    try:
        folder = locate(
            name,
            revision=os.environ.get("MODEL_REVISION") or None,
            caches=[Path(HF_HUB_CACHE)],
            token=os.environ.get("HF_TOKEN") or None,
        )
    except ModelNotFound as error:
        sys.exit(f"error: {error}")
    print(folder)


if __name__ == "__main__":
    main()
