"""Downloads from a hub, each start in a process of its own: revisions, refusals, two at once, one killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.fakes.hub import COMMIT, FakeHub

START = """
import os
from worker.errors import SettingsError
from worker.model_files import ModelFiles
from worker.settings import Settings
try:
    print(ModelFiles.find(Settings.from_env(os.environ)).folder)
except SettingsError as error:
    print("refused:", error)
"""
WEIGHTS = os.urandom(200_000)
FILES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "tokenizer.json": b"{}",
    "generation_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same weights again",
    "onnx/model.onnx": b"and again",
}


def start(hub: FakeHub, cache: Path, **environ: str) -> subprocess.Popen[str]:
    settings = {"MODEL_NAME": hub.repo, "DOWNLOAD_DIR": str(cache), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", START],
        env={**os.environ, **settings, "HF_HUB_DISABLE_XET": "1", **environ},
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=60)
    return out.strip()


def check(folder: str) -> None:
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert not (Path(folder) / "pytorch_model.bin").exists() and not (Path(folder) / "onnx").exists()


def test_every_file_comes_from_the_revision_and_only_once(tmp_path: Path) -> None:
    with FakeHub("org/m", FILES, revisions=("abc123",)) as hub:
        folder = result(start(hub, tmp_path, MODEL_REVISION="abc123"))
        check(folder)
        assert not [path for path in hub.requests if "main" in path]
        hub.requests.clear()
        assert result(start(hub, tmp_path, MODEL_REVISION="abc123")) == folder
        assert hub.requests == []  # what is complete on disk is never asked about


GUARD = """
import os, socket
connect, lookup = socket.socket.connect, socket.getaddrinfo
def refuse(what):
    with open({notes!r}, "a") as notes:
        notes.write(repr(what) + "\\n")
    raise OSError("no network")
def guarded_connect(self, address):
    if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
        refuse(address)
    return connect(self, address)
def guarded_lookup(host, *rest, **named):
    if host not in (None, "localhost", "127.0.0.1", "::1", b"localhost", b"127.0.0.1"):
        refuse(host)
    return lookup(host, *rest, **named)
socket.socket.connect, socket.getaddrinfo = guarded_connect, guarded_lookup
"""


def test_a_model_on_disk_is_served_without_any_network(serve: Serve, tmp_path: Path) -> None:
    """Every process of the server runs with a guard on its sockets."""
    notes = tmp_path / "notes"
    (tmp_path / "sitecustomize.py").write_text(GUARD.format(notes=str(notes)))
    server = serve(PYTHONPATH=str(tmp_path), HF_HUB_OFFLINE="0", DTYPE="float32").wait_ready()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=60).status_code == 200
    assert not notes.exists(), notes.read_text()
    probe = "import socket; socket.getaddrinfo('hub.example', 443)"
    done = subprocess.run([sys.executable, "-c", probe], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and notes.read_text() == "'hub.example'\n", "the guard is asleep"


def test_a_revision_of_the_tokenizer_is_the_tokenizers_alone(tmp_path: Path) -> None:
    with FakeHub("org/m", FILES, revisions=("abc123", "tok9")) as hub:
        result(start(hub, tmp_path, MODEL_REVISION="abc123", TOKENIZER_REVISION="tok9", HF_TOKEN="true"))
        asked = [path.split("/resolve/")[1] for path in hub.requests if "/resolve/" in path]
        assert "Bearer true" in hub.tokens, "a token is text, whatever it spells"
    weights = {"abc123/model.safetensors", f"{COMMIT}/model.safetensors"}
    assert any(path in weights for path in asked) and "tok9/model.safetensors" not in asked
    assert {path.split("/")[0] for path in asked} <= {"abc123", "tok9", COMMIT}


@pytest.mark.parametrize(
    ("environ", "told"),
    [({}, "set HF_TOKEN"), ({"HF_TOKEN": "tok_example_1"}, "HF_TOKEN has no access")],
)
def test_a_gated_model_names_the_token(tmp_path: Path, environ: dict[str, str], told: str) -> None:
    with FakeHub("org/m", FILES) as hub:
        hub.gated = True
        out = result(start(hub, tmp_path, **environ))
    assert out.startswith("refused: MODEL_NAME=org/m") and told in out and "tok_example_1" not in out


def test_an_unknown_revision_or_model_is_told(tmp_path: Path) -> None:
    with FakeHub("org/m", FILES) as hub:
        assert "no revision 'v9'" in result(start(hub, tmp_path, MODEL_REVISION="v9"))
        assert "nor a model on the hub" in result(start(hub, tmp_path, MODEL_NAME="org/other"))


def test_two_starts_at_once_and_one_killed_in_the_middle(tmp_path: Path) -> None:
    with FakeHub("org/m", FILES) as hub:
        hub.slow_s = 3.0
        killed = start(hub, tmp_path)
        deadline = time.monotonic() + 30
        while not any("model.safetensors" in path for path in hub.requests) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        hub.slow_s = 0.5
        for lock in tmp_path.rglob("*.lock"):  # left behind long ago
            os.utime(lock, (time.time() - 7200, time.time() - 7200))
        pair = [start(hub, tmp_path) for _ in range(2)]
        folders = [result(process) for process in pair]
        assert folders[0] == folders[1]
        check(folders[0])
