"""The worker's entry point: settings -> engine process -> runpod.serverless.start.

    MODEL_NAME=/models/some-model python -u handler.py

The engine loads its weights while this process imports the SDK and reads the tokenizer. A start that fails prints one
line and ends with code 1; no job is taken before the model is ready.
"""

from __future__ import annotations

import logging
import os
import sys
import time

# Read by libraries when they are imported; whoever sets them otherwise is obeyed.
LIBRARY_DEFAULTS = {
    "RUNPOD_LOG_LEVEL": "INFO",  # the SDK's own default writes every answer into the log
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # The SDK's checks would load torch and take GPU memory in this process; the engine's start proves the same.
    "RUNPOD_SKIP_AUTO_SYSTEM_CHECKS": "true",
    "RUNPOD_SKIP_GPU_CHECK": "true",
}
for _name, _value in LIBRARY_DEFAULTS.items():
    os.environ.setdefault(_name, _value)

from engine.client import EngineProcess, EngineStartError  # noqa: E402
from worker.errors import SettingsError  # noqa: E402
from worker.model_files import ModelFiles  # noqa: E402
from worker.settings import Settings, engine_config  # noqa: E402

log = logging.getLogger("worker")


def main() -> int:
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for chatty in ("httpx", "urllib3", "filelock", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    process: EngineProcess | None = None
    try:
        settings = Settings.from_env(os.environ)
        for line in settings.describe():
            log.info("setting %s", line)
        if settings.ignored:
            log.warning("these variables mean nothing here: %s", ", ".join(settings.ignored))
        files = ModelFiles.find(settings)
        process = EngineProcess.launch(engine_config(settings, files.folder, files.tokenizer_folder))
        run(settings, files, process, started)
    except (SettingsError, EngineStartError) as error:
        log.error("cannot start: %s", error)
        return 1
    finally:
        if process is not None:
            process.stop()
    return 0


def run(settings: Settings, files: ModelFiles, process: EngineProcess, started: float) -> None:
    """Waits for the engine, then serves jobs until the SDK's loop ends."""

    def progress(line: str) -> None:
        log.info("[%5.1f s] engine: %s", time.monotonic() - started, line)

    # Imported only now: the engine is already loading.
    import runpod
    import uvloop

    from worker.served import ModelText
    from worker.worker import Worker

    text = ModelText.load(files, settings)
    log.info("[%5.1f s] tokenizer and chat template ready", time.monotonic() - started)
    info = process.wait_ready(progress)
    worker = Worker(settings, text, process, info)
    log.info(
        "[%5.1f s] ready: %s on %s, %d tokens of context, %d pages of %d tokens",
        time.monotonic() - started,
        ", ".join(worker.model.names),
        info.device,
        worker.model.info.max_model_len,
        info.num_pages,
        info.page_size,
    )
    log.info("chat template: %s", worker.model.templates.why)
    uvloop.install()  # the SDK's loop then takes less of the engine's CPU time
    runpod.serverless.start(
        {
            "handler": worker.handle,
            "concurrency_modifier": worker.concurrency,
            "return_aggregate_stream": True,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
