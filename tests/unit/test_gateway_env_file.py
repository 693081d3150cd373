"""The file of settings: what people and their editors write, and what is no such file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.env_file import read_env_file
from worker.errors import SettingsError


def read(folder: Path, content: bytes, **environ: str) -> dict[str, str]:
    file = folder / "env"
    file.write_bytes(content)
    read_env_file(file, environ)
    return environ


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbfMODEL_NAME=org/m\r\nPORT=8001\r\n", {"MODEL_NAME": "org/m", "PORT": "8001"}),
        (b"export PORT = 8001 # mine\n# PORT=1\n\nHOST\n", {"PORT": "8001"}),
        (b'HF_OVERRIDES={"a": 1}\nDEFAULT_CHAT_TEMPLATE_KWARGS=\'{"b": "c"}\'\n',
         {"HF_OVERRIDES": '{"a": 1}', "DEFAULT_CHAT_TEMPLATE_KWARGS": '{"b": "c"}'}),
        (b"API_KEY=sk-${HOME}$x#1\n", {"API_KEY": "sk-${HOME}$x#1"}),
        (b"PORT=1\nPORT=2\n", {"PORT": "2"}),
        (b"", {}),
    ],
)  # fmt: skip
def test_values_are_taken_as_they_stand(tmp_path: Path, content: bytes, expected: dict[str, str]) -> None:
    assert read(tmp_path, content) == expected


def test_the_environment_wins_and_no_file_is_no_error(tmp_path: Path) -> None:
    assert read(tmp_path, b"PORT=1\nHOST=h\n", PORT="2") == {"PORT": "2", "HOST": "h"}
    read_env_file(tmp_path / "none", {})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PORT=1\nAPI_KEY='sk-1\nHOST=h\n", "line 2"),
        (b"PORT=1\n\n=8000\n", "line [23]"),
        (b"NAME=\xff\xfe\n", "UTF-8"),
        ("PORT=1\n".encode("utf-16"), "UTF-8"),
    ],
)
def test_a_line_that_cannot_be_read_ends_the_start(tmp_path: Path, content: bytes, told: str) -> None:
    """It was skipped, and the server came up without a setting; or a traceback."""
    with pytest.raises(SettingsError, match=told) as error:
        read(tmp_path, content)
    assert "sk-1" not in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_env_file(tmp_path, {})
