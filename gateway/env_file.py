"""Reads a file of settings into the environment: lines NAME=value, as Docker and most tools write them.

Values are taken as they stand: nothing in them is replaced by other variables.
"""

from __future__ import annotations

import io
from collections.abc import MutableMapping
from pathlib import Path

from dotenv.parser import parse_stream

from worker.errors import SettingsError


def read_env_file(file: Path, environ: MutableMapping[str, str]) -> None:
    """Adds what the file says to `environ`, whose own values win; no file, no settings. Raises SettingsError."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{file} is not a text in UTF-8") from None
    values: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text)):
        if binding.error:
            raise SettingsError(f"{file}, line {binding.original.line}: expected NAME=value, quotes closed")
        if binding.key is not None and binding.value is not None:
            values[binding.key] = binding.value
    for name, value in values.items():
        environ.setdefault(name, value)
