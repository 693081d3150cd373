"""Routes, the SDK's environment, what is printed."""

from __future__ import annotations

from typing import Any

import pytest

from gateway import routes
from gateway.asgi import respond
from gateway.console import Console, ready_text
from gateway.listening import Failed, open_socket, origin_of, reachable
from gateway.middleware import EarlyAnswers
from gateway.sdk_environment import worker_environment
from worker.errors import MethodNotAllowed, RouteNotFound


@pytest.mark.parametrize("prefix", routes.PREFIXES)
def test_every_route_is_found_below_every_prefix(prefix: str) -> None:
    assert routes.find("POST", prefix + "/chat/completions").name == "/v1/chat/completions"
    assert routes.find("GET", prefix + "/models/").name == "/v1/models"
    assert routes.find("HEAD", prefix + "/models").name == "/v1/models"
    assert routes.find("GET", prefix + "/models/org/name").name == "/v1/models/org/name"
    assert routes.find("GET", prefix + "/health").name == "/health"
    assert routes.find("POST", prefix + "/tokenize").name == "/tokenize"


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v2/other/openai/v1/models", "/model/x", "/v1/chat", "/v1/models/"]
)
def test_other_paths(path: str) -> None:
    if path == "/v1/models/":
        assert routes.find("GET", path).name == "/v1/models"
        return
    with pytest.raises(RouteNotFound):
        routes.find("GET", path)


def test_the_wrong_method_is_told_from_the_wrong_path() -> None:
    with pytest.raises(MethodNotAllowed, match="takes POST, not GET") as caught:
        routes.find("GET", "/v1/completions")
    assert caught.value.allow == "POST"
    with pytest.raises(MethodNotAllowed) as caught:
        routes.find("DELETE", "/v1/models/x")
    assert caught.value.allow == "GET, HEAD"


@pytest.mark.parametrize(
    ("headers", "parts", "read", "closes"),
    [
        ([(b"content-length", b"9")], 3, False, True),
        ([(b"transfer-encoding", b"chunked")], 3, False, True),
        ([(b"content-length", b"9")], 3, True, False),
        ([(b"content-length", b"0")], 1, False, False),
        ([], 1, False, False),
    ],
)
async def test_an_answer_before_the_body_is_sent_at_once_and_the_rest_is_thrown_away(
    headers: Any, parts: int, read: bool, closes: bool
) -> None:
    events: list[str] = []
    incoming = [{"type": "http.request", "body": b"abc", "more_body": n < parts - 1} for n in range(parts)]

    async def receive() -> Any:
        events.append("read")
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        events.append(message["type"].rsplit(".", 1)[1] + (" more" if message.get("more_body") else ""))
        if message["type"] == "http.response.start":
            assert ((b"connection", b"close") in message["headers"]) == closes

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while read and (await receive())["more_body"]:
            pass
        await respond(send, 413, b"no")

    await EarlyAnswers(app)({"type": "http", "headers": headers}, receive, send)
    if closes:
        assert events == ["start", "body more", *["read"] * parts, "body"]
    else:
        assert events == [*["read"] * (parts if read else 0), "start", "body"]


def test_a_long_path_is_not_echoed_whole() -> None:
    with pytest.raises(RouteNotFound) as caught:
        routes.find("GET", "/" + "x" * 100_000)
    assert len(caught.value.message) < 300


def test_the_workers_environment() -> None:
    given = {
        "API_KEY": "users", "RUNPOD_REALTIME_PORT": "1", "RUNPOD_ENDPOINT_ID": "e", "HF_TOKEN": "h",
        "RUNPOD_LOG_LEVEL": "WARN", "NO_PROXY": "corp",
    }  # fmt: skip
    made = worker_environment(given, "http://127.0.0.1:1", "s3cret", "local-1")
    assert made["RUNPOD_WEBHOOK_GET_JOB"] == "http://127.0.0.1:1/worker/s3cret/job-take/$ID?local=1"
    for name in ("GET_JOB", "POST_STREAM", "POST_OUTPUT"):
        assert "?" in made[f"RUNPOD_WEBHOOK_{name}"], "the SDK appends &name=value"
    assert int(made["RUNPOD_PING_INTERVAL"]) >= 1000
    assert {"API_KEY", "RUNPOD_REALTIME_PORT", "RUNPOD_ENDPOINT_ID"}.isdisjoint(made)
    assert (made["HF_TOKEN"], made["RUNPOD_LOG_LEVEL"]) == ("h", "WARN")
    assert made["NO_PROXY"].startswith("corp,") and "127.0.0.1" in made["NO_PROXY"]


def test_a_host_that_is_none_is_one_clear_line() -> None:
    with pytest.raises(Failed, match=r"cannot listen on HOST=no\.such\.host\.invalid PORT=0"):
        open_socket("no.such.host.invalid", 0)


def test_origins() -> None:
    with open_socket("127.0.0.1", 0) as listening:
        assert origin_of(listening) == f"http://127.0.0.1:{listening.getsockname()[1]}"
    assert reachable("http://0.0.0.0:80") == "http://127.0.0.1:80"
    assert reachable("http://[::]:80") == "http://[::1]:80"


def test_the_snippet_is_five_lines_and_compiles() -> None:
    text = ready_text("http://127.0.0.1:8000", 'org/it\'s "x"', 1.25, with_key=True)
    lines = text.strip().splitlines()
    assert lines[0].startswith("ready in 1.2 s: ") or lines[0].startswith("ready in 1.3 s: ")
    snippet = lines[lines.index("from openai import OpenAI") :]
    assert len(snippet) == 5
    compile("\n".join(snippet), "snippet", "exec")


def test_the_line_by_which_a_child_fails_is_kept_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.from_child("2026-11-29 19:36:30,123 INFO [  2.1 s] engine: weights")
    console.from_child("2026-11-29 19:36:31,000 ERROR cannot start: MODEL_NAME=/none: no such folder")
    assert console.reason == "MODEL_NAME=/none: no such folder"
    printed = capsys.readouterr().out
    assert printed.endswith(" s  [  2.1 s] engine: weights\n") and "MODEL_NAME" not in printed
