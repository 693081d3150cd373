"""The real handler with the scripted engine in place of the real one. See scripted_engine.py for the script."""

from __future__ import annotations

import os
import time

import handler
from engine.client import EngineProcess
from worker.model_files import ModelFiles
from worker.settings import Settings, engine_config

if __name__ == "__main__":
    started = time.monotonic()
    settings = Settings.from_env(os.environ)
    files = ModelFiles.find(settings)
    process = EngineProcess.launch(
        engine_config(settings, files.folder, files.tokenizer_folder), module="tests.fakes.scripted_engine"
    )
    try:
        handler.run(settings, files, process, started)
    finally:
        process.stop()
