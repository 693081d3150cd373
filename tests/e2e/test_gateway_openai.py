"""The OpenAI side of the gateway, with the real SDKs at both ends and a scripted handler in between."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.served import Served

JSON = {"content-type": "application/json"}
MESSAGES: Any = [{"role": "user", "content": "one two three"}]


def client(echo: Served, **options: Any) -> OpenAI:
    return OpenAI(base_url=echo.base_url, api_key="none", **{"max_retries": 0, "timeout": 30, **options})


def chat(echo: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{echo.origin}/v1/chat/completions", json=body, timeout=30)


@pytest.mark.parametrize("prefix", ["/v2/local/openai/v1", "/v1", ""])
def test_every_prefix_serves_models_chat_and_streams(echo: Served, prefix: str) -> None:
    sdk = OpenAI(base_url=echo.origin + prefix, api_key="none", max_retries=0)
    model = sdk.models.list().data[0].id
    whole = sdk.chat.completions.create(model=model, messages=MESSAGES)
    stream = sdk.chat.completions.create(model=model, messages=MESSAGES, stream=True)
    got = json.loads(whole.choices[0].message.content or "")
    assert got["openai_route"] == "/v1/chat/completions"
    assert got["openai_input"]["messages"] == MESSAGES
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one two three "


def test_a_model_name_with_slashes_reaches_the_worker_as_route(echo: Served) -> None:
    answer = httpx.get(f"{echo.origin}/v1/models/echo/echo-1").json()
    got = json.loads(answer["choices"][0]["message"]["content"])
    assert got == {"openai_route": "/v1/models/echo/echo-1"}


def test_the_printed_snippet_and_curl_line_work_when_pasted(echo: Served) -> None:
    start = echo.lines.index("from openai import OpenAI")
    snippet = "\n".join(echo.lines[start : start + 5])
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("Hello! ", 0), done.stderr
    curl = next(line for line in echo.lines if line.startswith("curl "))
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60)
    assert "Hello!" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere(echo: Served) -> None:
    page = httpx.get(echo.origin)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page.text)


def test_plain_text_is_given_with_the_media_type_of_its_route(echo: Served) -> None:
    answer = httpx.get(f"{echo.origin}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.text.endswith("echo 1\n")


def test_headers_that_matter_go_into_the_body_and_the_id_comes_back(echo: Served) -> None:
    answer = httpx.post(
        f"{echo.origin}/v1/chat/completions",
        json={"messages": MESSAGES, "request_id": "from-body", "priority": 9},
        headers={"X-Request-Id": "from-header", "X-Priority": "-2"},
    )
    got = json.loads(answer.json()["choices"][0]["message"]["content"])["openai_input"]
    assert (got["request_id"], got["priority"]) == ("from-header", -2)
    assert answer.headers["x-request-id"] == "from-header"
    named = chat(echo, messages=MESSAGES, request_id="from-body")
    assert named.headers["x-request-id"] == "from-body"
    unnamed = chat(echo, messages=MESSAGES)
    got = json.loads(unnamed.json()["choices"][0]["message"]["content"])["openai_input"]
    assert unnamed.headers["x-request-id"] == got["request_id"]
    wrong = chat(echo, messages=MESSAGES, request_id=5)  # for the worker to refuse
    got = json.loads(wrong.json()["choices"][0]["message"]["content"])["openai_input"]
    assert got["request_id"] == 5 and wrong.headers["x-request-id"]


def test_an_error_before_any_output_is_an_http_error_even_for_a_stream(echo: Served) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as caught:
            client(echo).chat.completions.create(
                model="m", messages=MESSAGES, stream=stream, extra_body={"do": [["sleep", 0.05], ["fail", 404, "no m"]]}
            )
        assert caught.value.code == "scripted" and "no m" in caught.value.message


def test_retry_after_of_the_worker_becomes_the_header(echo: Served) -> None:
    answer = chat(echo, do=[["fail", 429, "slow down", 2.3]], stream=True)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


def test_a_failure_after_output_is_an_error_event_then_done(echo: Served) -> None:
    answer = chat(echo, do=[["say", "x"], ["raise", "secret at /srv/private"]], stream=True)
    events = [event for event in answer.text.split("\n\n") if event]
    assert answer.status_code == 200 and len(events) == 3 and events[-1] == "data: [DONE]"
    error = json.loads(events[1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "private" not in answer.text
    with pytest.raises(openai.APIError):
        for _ in client(echo).chat.completions.create(
            model="m", messages=MESSAGES, stream=True, extra_body={"do": [["say", "x"], ["raise", "oops"]]}
        ):
            pass


@pytest.mark.parametrize(
    ("status", "error", "tries"),
    [
        (400, openai.BadRequestError, 1),
        (429, openai.RateLimitError, 2),
        (500, openai.InternalServerError, 2),
        (503, openai.InternalServerError, 2),
    ],
)
def test_the_sdk_tries_again_what_may_pass_and_nothing_else(
    echo: Served, status: int, error: type[openai.APIStatusError], tries: int
) -> None:
    before = num_started(echo)
    with pytest.raises(error) as caught:
        client(echo, max_retries=1).chat.completions.create(
            model="m", messages=MESSAGES, extra_body={"do": [["fail", status, "told"]]}
        )
    assert caught.value.status_code == status and "told" in caught.value.message
    assert num_started(echo, at_least=before + tries) == before + tries


def num_started(echo: Served, at_least: int = 0) -> int:
    """Jobs that the worker has begun, by its log, which comes a little later than its answers."""
    deadline, seen = time.monotonic() + 10, -1
    while (now := sum("started" in line for line in echo.lines)) != seen or now < at_least:
        if time.monotonic() > deadline:
            break
        seen = now
        time.sleep(0.5)
    return now


def test_a_stream_without_done_gets_one(echo: Served) -> None:
    assert chat(echo, do=[["say", "x"]], stream=True).text.endswith("\n\ndata: [DONE]\n\n")
    cut = chat(echo, do=[["text", "data: {}"]], stream=True).text
    assert cut == "data: {}\n\ndata: [DONE]\n\n"


def test_chunks_arrive_while_the_rest_is_still_being_made(echo: Served) -> None:
    body = {"do": [["say", "first"], ["sleep", 2.0], ["say", "last"]]}
    with httpx.stream("POST", f"{echo.origin}/v1/chat/completions", json=body, timeout=30) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line]
    assert times[-1] - times[0] > 0.5


def test_non_finite_numbers_become_null_and_text_comes_whole(echo: Served) -> None:
    assert chat(echo, do=[["nan"]]).json() == {"value": None}
    assert chat(echo, do=[["text", '{"half": '], ["text", '"whole"}']]).json() == {"half": "whole"}
    assert chat(echo, do=[["object", {"text": "é\u0000🦊"}]]).json() == {"text": "é\u0000🦊"}


def test_fields_the_worker_ignored_are_named_in_a_header(echo: Served) -> None:
    answer = chat(echo, do=[["text", ": ignored-fields best_off, x\n\n"], ["say", "x"]])
    assert answer.headers["x-ignored-fields"] == "best_off, x"
    assert chat(echo, do=[["object", {"ignored_fields": ["a", "ß\n"]}]]).headers["x-ignored-fields"] == "a, ??"


def bad_requests() -> list[tuple[str, bytes, dict[str, str], int, str]]:
    deep = b'{"a":' * 3000 + b"1" + b"}" * 3000
    medium = b'{"a":' * 400 + b"1" + b"}" * 400
    return [
        ("malformed", b'{"messages": [', JSON, 400, "not valid JSON"),
        ("not an object", b"[1]", JSON, 400, "must be a JSON object"),
        ("empty", b"", JSON, 400, "no body"),
        ("form", b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 400, "content type"),
        ("no content type", b"{}", {}, 400, "content type"),
        ("NaN", b'{"temperature": NaN}', JSON, 400, "not valid JSON"),
        ("half a surrogate pair", b'{"messages": "\\ud800"}', JSON, 400, "not valid JSON"),
        ("not UTF-8", b'{"messages": "\xff"}', JSON, 400, "not valid JSON"),
        ("raw NUL", b'{"messages": "\x00"}', JSON, 400, "not valid JSON"),
        ("nested 3000 deep", deep, JSON, 400, "JSON"),
        ("nested 400 deep", medium, JSON, 400, "nested deeper"),
        ("too large", b'{"a": "' + b"x" * 20_000_001 + b'"}', JSON, 413, "larger than 20 MB"),
        ("gzip", gzip.compress(b"{}"), {**JSON, "content-encoding": "gzip"}, 415, "Content-Encoding"),
        ("gzip after all", b"{}", {**JSON, "content-encoding": "identity, gzip"}, 415, "Content-Encoding"),
        ("bad id", b"{}", {**JSON, "x-request-id": "a b"}, 400, "X-Request-Id"),
        ("bad priority", b"{}", {**JSON, "x-priority": "high"}, 400, "X-Priority"),
    ]


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"), [pytest.param(*c[1:], id=c[0]) for c in bad_requests()]
)
def test_a_bad_request_gets_a_clear_answer_and_the_next_is_served(
    echo: Served, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answer = httpx.post(f"{echo.origin}/v1/chat/completions", content=body, headers=headers, timeout=30)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["type"] == "invalid_request_error" and error["code"]
    assert len(answer.content) < 1000
    assert chat(echo, messages=MESSAGES).status_code == 200


@pytest.mark.parametrize("how", ["content-length: 25000000", "transfer-encoding: chunked", "expect: 100-continue"])
def test_a_body_that_is_too_large_is_refused_as_soon_as_that_is_known(echo: Served, how: str) -> None:
    """By its length before any of it has come; without one, while the sender is still at it."""
    host, port = echo.origin.removeprefix("http://").split(":")
    more = "\r\ncontent-length: 25000000" if how.startswith("expect") else ""
    with socket.create_connection((host, int(port)), timeout=20) as sender:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{how}{more}"
        sender.sendall(head.encode() + b"\r\n\r\n")
        if "chunked" in how:
            for _ in range(21):
                sender.sendall(b"f4240\r\n" + b"x" * 1_000_000 + b"\r\n")
        started = time.monotonic()
        answer = sender.recv(65536)
        assert time.monotonic() - started < 10  # the rest of the body would never come
        while b"request_too_large" not in answer and (part := sender.recv(65536)):
            answer += part
        assert answer.startswith(b"HTTP/1.1 413 ") and b"larger than 20 MB" in answer
        assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:5", 200),
        ("[::1]:8000", 200),
        ("app.localhost", 200),
        ("evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("192.168.0.7", 403),
        ("[::1", 200),
        ("", 403),
    ],
)
def test_a_server_on_loopback_answers_by_local_names_only(echo: Served, host: str, status: int) -> None:
    """A page of evil.example, which has been made to lead here, is of the same origin for its browser."""
    headers = {"host": host, "origin": f"http://{host}"}
    answer = httpx.get(f"{echo.origin}/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 403:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("host_not_allowed", "Host") and "ALLOWED_HOSTS" in error["message"]


def test_a_body_of_almost_20_mb_and_one_with_ten_thousand_messages_are_served(echo: Served) -> None:
    assert chat(echo, do=[["object", {"ok": True}]], padding="x" * 19_900_000).json() == {"ok": True}
    many = [{"role": "user", "content": "hi"}] * 10_000
    assert chat(echo, do=[["object", {"ok": True}]], messages=many).json() == {"ok": True}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_url"),
        ("POST", "/v1/nope", 404, "unknown_url"),
        ("GET", "/openapi.json", 404, "unknown_url"),
        ("GET", "/v2/other/openai/v1/models", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v2/local/run", 405, "method_not_allowed"),
        ("GET", "/v2/local/status/none", 404, "job_not_found"),
        ("GET", "/worker/guess/job-take/w?x=1", 404, None),
    ],
)
def test_unknown_routes_and_wrong_methods(echo: Served, method: str, path: str, status: int, code: str) -> None:
    answer = httpx.request(method, echo.origin + path)
    assert answer.status_code == status
    if code:
        assert answer.json()["error"]["code"] == code


async def test_a_client_that_leaves_cancels_its_job_and_no_other(echo: Served) -> None:
    async with AsyncOpenAI(base_url=echo.base_url, api_key="none", max_retries=0) as sdk:

        async def leave(marker: str, stream: bool) -> None:
            script = [["say", marker]] if stream else []
            call = sdk.chat.completions.create(
                model="m", messages=MESSAGES, stream=stream, extra_body={"do": [*script, ["sleep", 20]]}
            )
            if stream:
                answer = await call
                await anext(aiter(answer))
                await answer.close()
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call, 0.5)

        stays = asyncio.create_task(
            sdk.chat.completions.create(
                model="m", messages=MESSAGES, extra_body={"do": [["sleep", 2.5], ["object", {"id": "stayed"}]]}
            )
        )
        before = sum("cancelled" in line for line in echo.lines)
        await leave("left", stream=True)
        await leave("left", stream=False)
        deadline = time.monotonic() + 15
        while sum("cancelled" in line for line in echo.lines) < before + 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert sum("cancelled" in line for line in echo.lines) == before + 2
        assert (await stays).id == "stayed"


async def test_a_burst_of_32_streams_is_taken_at_once_and_each_gets_its_own_answer(echo: Served) -> None:
    async with AsyncOpenAI(base_url=echo.base_url, api_key="none", max_retries=0, timeout=60) as sdk:

        async def one(number: int) -> str:
            script = [["say", f"{number} "], ["sleep", 1.0], ["many", 20, f"of {number} "]]
            stream = await sdk.chat.completions.create(
                model="m", messages=MESSAGES, stream=True, extra_body={"do": script}
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        started = time.monotonic()
        answers = await asyncio.gather(*[one(number) for number in range(32)])
    for number, answer in enumerate(answers):
        assert answer == f"{number} " + "".join(f"{step} of {number} " for step in range(20))
    assert time.monotonic() - started < 20, "one after the other would take 32 s"
