"""Keys, origins, queue bounds and slow readers: servers with settings of their own."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai import OpenAI

from tests.e2e.conftest import Serve
from tests.e2e.served import ECHO, Served

SLOW: dict[str, Any] = {"do": [["sleep", 8]]}


def test_key_origins_and_queue_bound(serve: Serve) -> None:
    """One server for several settings, since a start takes seconds."""
    server = serve(
        ECHO,
        API_KEY="sk-right",
        ALLOWED_HOSTS="Tunnel.example",
        CORS_ORIGINS="https://app.example",
        MAX_QUEUED_JOBS="2",
        ECHO_CONCURRENCY="1",
    ).wait_ready(60)
    check_key(server)
    check_origins(server)
    check_full_queue(server)
    assert "sk-right" not in server.log()


def check_key(server: Served) -> None:
    url = f"{server.origin}/v1/models"
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer sk-right-not"},
        {"authorization": "ß"},
    ):
        sent = {name: value.encode() for name, value in headers.items()}
        answer = httpx.get(url, headers=sent)
        error = answer.json()["error"]
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.status_code == 401 and error["code"] == "invalid_api_key" and "sk-" not in error["message"]
    for value in ("Bearer sk-right", "bearer sk-right", "sk-right"):
        assert httpx.get(url, headers={"authorization": value}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=server.base_url, api_key="wrong", max_retries=0).models.list()
    assert httpx.get(f"{server.jobs_url}/health").status_code == 401
    assert httpx.get(f"{server.origin}/health").status_code == 200
    assert httpx.get(server.origin).status_code == 200  # the page, which asks for the key
    big = httpx.post(f"{server.origin}/v1/completions", content=b"x" * 15_000_000, timeout=20)
    assert big.status_code == 401  # told to the sender, although nobody has read what it sent
    named = {"authorization": "sk-right", "host": "tunnel.example:443"}
    assert httpx.get(url, headers=named).status_code == 200


def check_origins(server: Served) -> None:
    url = f"{server.origin}/v1/models"
    key = {"authorization": "Bearer sk-right"}
    allowed = httpx.get(url, headers={**key, "origin": "https://app.example"})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://app.example")
    refused = httpx.get(url, headers={**key, "origin": "https://evil.example"})
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    assert httpx.get(url, headers={**key, "origin": server.origin}).status_code == 200
    preflight = httpx.options(
        url,
        headers={
            "origin": "https://app.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    unauthorized = httpx.get(url, headers={"origin": "https://app.example"})
    assert unauthorized.status_code == 401 and "access-control-allow-origin" in unauthorized.headers


def check_full_queue(server: Served) -> None:
    """The one worker slot is taken, two jobs wait, the next is refused; what waits is purged."""
    key = {"authorization": "Bearer sk-right"}

    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{server.jobs_url}/{path}", json=body, headers=key, timeout=30)

    first = post("run", input=SLOW).json()["id"]
    server.wait_for_line(f"{first} started")
    waiting = [post("run", input=SLOW).json()["id"] for _ in range(2)]
    refused = post("run", input=SLOW)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    sdk = OpenAI(base_url=server.base_url, api_key="sk-right", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
    assert post("purge-queue").json() == {"removed": 2, "status": "completed"}
    for job_id in waiting:
        view = httpx.get(f"{server.jobs_url}/status/{job_id}", headers=key).json()
        assert view["status"] == "CANCELLED"
    post(f"cancel/{first}")


def test_a_reader_that_takes_nothing_costs_little_memory_and_nobody_elses_time(serve: Serve) -> None:
    server = serve(ECHO, RATE_LIMIT="3").wait_ready(60)
    host, port = server.origin.removeprefix("http://").split(":")
    gateway = psutil.Process(server.child("gateway.server"))
    body = b'{"stream":true,"do":[["many",3000,"' + b"x" * 20_000 + b'"]]}'  # 60 MB of answer
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        reader.sendall(head.encode() + body)
        assert reader.recv(12) == b"HTTP/1.1 200"
        time.sleep(1)
        before = gateway.memory_info().rss
        started = time.monotonic()
        quick = httpx.post(f"{server.origin}/v1/chat/completions", json={"do": [["object", {"ok": True}]]}, timeout=20)
        assert quick.json() == {"ok": True} and time.monotonic() - started < 10
        time.sleep(2)
        assert gateway.memory_info().rss - before < 10_000_000
    server.wait_for_line("cancelled")  # the reader has gone, and with it the job
    check_rate_limit(server)


def check_rate_limit(server: Served) -> None:
    """Two requests of three in ten seconds are used up."""
    codes = [httpx.post(f"{server.jobs_url}/run", json={"input": {"do": []}}) for _ in range(2)]
    assert [answer.status_code for answer in codes] == [200, 429]
    assert 1 <= int(codes[1].headers["retry-after"]) <= 10
    assert httpx.get(f"{server.origin}/v1/models").status_code == 200  # reading is not limited
