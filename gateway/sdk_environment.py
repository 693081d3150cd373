"""The environment in which the unmodified runpod SDK takes its jobs from this gateway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gateway.worker_api import PREFIX

# Of a start inside a pod or a worker, these would lead the SDK elsewhere (another platform, another port).
_FOREIGN = "RUNPOD_"
_KEPT = {"RUNPOD_LOG_LEVEL"}
# Whole seconds: below 1000 the SDK divides it to 0 and its ping process dies.
PING_INTERVAL_MS = 2000


def worker_environment(environ: Mapping[str, str], base_url: str, secret: str, worker_id: str) -> dict[str, str]:
    """`environ` for the worker process. `base_url` is the gateway's as the worker reaches it, without a slash."""
    api = f"{base_url}{PREFIX}{secret}"
    inherited = {name: value for name, value in environ.items() if not name.startswith(_FOREIGN) or name in _KEPT}
    inherited.pop("API_KEY", None)  # the users' key is none of its business
    no_proxy = ",".join(filter(None, (environ.get("NO_PROXY"), environ.get("no_proxy"), "127.0.0.1,localhost,::1")))
    return {
        "RUNPOD_LOG_LEVEL": "INFO",
        **inherited,
        "PYTHONUNBUFFERED": "1",
        # The SDK's pings would otherwise go through a proxy.
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        # The SDK appends "&name=value" to these, so each must have a query already.
        "RUNPOD_WEBHOOK_GET_JOB": f"{api}/job-take/$ID?local=1",
        "RUNPOD_WEBHOOK_POST_STREAM": f"{api}/job-stream/$RUNPOD_POD_ID/$ID?local=1",
        "RUNPOD_WEBHOOK_POST_OUTPUT": f"{api}/job-done/$RUNPOD_POD_ID/$ID?local=1",
        "RUNPOD_WEBHOOK_PING": f"{api}/ping/$RUNPOD_POD_ID",
        "RUNPOD_PING_INTERVAL": str(PING_INTERVAL_MS),
        "RUNPOD_POD_ID": worker_id,
        # Only has to be there for the SDK to ping at all. What it sends may be another one, from ~/.runpod/config.toml;
        # the secret in the URL is what counts here.
        "RUNPOD_AI_API_KEY": "local",
        # Its start-up checks reach for the internet and, with a GPU, compete with the engine for memory.
        "RUNPOD_SKIP_AUTO_SYSTEM_CHECKS": "true",
        "RUNPOD_SKIP_GPU_CHECK": "true",
    }


def importable(environ: Mapping[str, str], root: Path) -> dict[str, str]:
    """`environ` in which Python finds this project from any folder."""
    paths = [str(root), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": ":".join(paths)}
