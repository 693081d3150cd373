"""What clients do with HTTP itself: offers of other protocols, odd methods, marks before the JSON, no HTTP at all."""

from __future__ import annotations

import itertools
import json
import socket
import time

import httpx
import pytest

from tests.e2e.served import Served

BODY = json.dumps({"messages": [{"role": "user", "content": "one two"}]}).encode()
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
# As Java's HTTP client sends it with every request until it knows better.
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQBAAAA\r\n"


def connect(echo: Served) -> socket.socket:
    host, port = echo.origin.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read_answer(peer: socket.socket) -> tuple[bytes, bytes]:
    """(head, body) of one answer with a content-length."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = peer.recv(65536)
        assert part, data
        data += part
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        part = peer.recv(65536)
        assert part, data
        body += part
    return head, body


@pytest.mark.parametrize("offer", [H2C, b"connection: keep-alive, Upgrade\r\nupgrade: websocket\r\n"])
@pytest.mark.parametrize("cuts", [(), (20,), (150, -40), (-len(BODY),), (-5,)])
def test_an_offer_of_another_protocol_costs_a_request_nothing(
    echo: Served, offer: bytes, cuts: tuple[int, ...]
) -> None:
    """The body was taken for the other protocol and lost: every POST of a Java client failed."""
    request = CHAT + offer + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    places = [0, *(cut % len(request) for cut in cuts), len(request)]
    with connect(echo) as peer:
        for _ in range(2):  # the connection goes on in HTTP/1.1
            for start, end in itertools.pairwise(places):
                peer.sendall(request[start:end])
                time.sleep(0.02)
            head, body = read_answer(peer)
            assert head.startswith(b"HTTP/1.1 200 ")
            got = json.loads(json.loads(body)["choices"][0]["message"]["content"])
            assert got["openai_input"]["messages"][0]["content"] == "one two"


def test_a_connection_that_is_to_be_closed_behind_an_offer_is_closed(echo: Served) -> None:
    with connect(echo) as peer:
        offer = b"connection: close, Upgrade\r\nupgrade: h2c\r\n"
        peer.sendall(CHAT + offer + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        assert read_answer(peer)[0].startswith(b"HTTP/1.1 200 ") and peer.recv(1) == b""


def test_requests_in_a_row_each_get_their_answer_offers_among_them(echo: Served) -> None:
    plain = CHAT + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    offering = CHAT + H2C + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    with connect(echo) as peer:
        peer.sendall(plain + offering + plain + offering)
        data = b""
        while data.count(b"one two") < 4:
            part = peer.recv(65536)
            assert part, data
            data += part
    assert data.count(b"HTTP/1.1 200 ") == 4


def test_a_chunked_body_behind_an_offer_is_read(echo: Served) -> None:
    with connect(echo) as peer:
        peer.sendall(CHAT + H2C + b"transfer-encoding: chunked\r\n\r\n")
        for part in (BODY[:10], BODY[10:], b""):
            peer.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        head, body = read_answer(peer)
    assert head.startswith(b"HTTP/1.1 200 ") and b"one two" in body


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS: a client that was given https://
        CHAT + b"content-length: many\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_request_is_told_so_in_the_shape_of_all_errors(echo: Served, sent: bytes) -> None:
    with connect(echo) as peer:
        peer.sendall(sent)
        head, body = read_answer(peer)
        assert peer.recv(1) == b""
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v2/local/openai/v1/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/models/echo/echo-1", "GET, HEAD"),
        ("GET", "/v2/local/run", "POST"),
        ("POST", "/v2/local/status/none", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("PATCH", "/", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(echo: Served, method: str, path: str, allow: str) -> None:
    answer = httpx.request(method, echo.origin + path)
    assert answer.status_code == 405
    assert sorted(answer.headers["allow"].split(", ")) == sorted(allow.split(", "))
    assert method in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/health", "/v2/local/health", "/"])
def test_head_is_get_without_the_body(echo: Served, path: str) -> None:
    answer, whole = httpx.head(echo.origin + path), httpx.get(echo.origin + path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == whole.headers["content-type"]


def test_a_byte_order_mark_before_the_json_is_skipped(echo: Served) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    answer = httpx.post(f"{echo.origin}/v1/chat/completions", content=b"\xef\xbb\xbf" + BODY, headers=headers)
    assert answer.status_code == 200 and "one two" in answer.text


def test_a_model_can_be_asked_for_below_every_prefix(echo: Served) -> None:
    for prefix in ("/v2/local/openai/v1", "/v1", ""):
        answer = httpx.get(f"{echo.origin}{prefix}/models/echo/echo-1").json()
        assert "/v1/models/echo/echo-1" in answer["choices"][0]["message"]["content"]
