"""The first output decides what a client gets; the end is always a proper end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway import relay
from gateway.asgi import ClientGone
from gateway.broker import Broker
from gateway.job import Job, Status

EVENT = 'data: {"x":1}\n\n'


class Client:
    """Collects what is sent; `stuck` makes it take nothing more."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self.stuck = False

    async def send(self, message: Any) -> None:
        if self.stuck:
            await asyncio.sleep(3600)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)


async def answered(*outputs: Any, error: Any = None, aggregate: bool = True) -> Client:
    """A client's view of a job that yields `outputs` and then ends."""
    broker, client = Broker(), Client()
    job = Job("j", b'{"input":{}}', 0)
    broker.submit(job, 60)
    await broker.take(broker.worker("w"), 1, 0)
    task = asyncio.create_task(relay.answer(job, client.send, "text/x"))
    for output in outputs:
        broker.chunk("w", "j", output, 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    body = {"error": error} if error else {"output": list(outputs) if aggregate else []}
    broker.done("w", "j", body, 1)
    assert await asyncio.wait_for(task, 1)
    assert client.ended
    return client


async def test_an_object_is_json() -> None:
    client = await answered({"a": float("nan")})
    assert (client.status, client.body, client.headers["content-type"]) == (200, b'{"a":null}', "application/json")


async def test_text_is_gathered_and_typed_by_its_route() -> None:
    client = await answered("# TYPE", " x\n")
    assert (client.status, client.body, client.headers["content-type"]) == (200, b"# TYPE x\n", "text/x")


async def test_text_that_fails_halfway_is_an_error_with_its_status() -> None:
    client = await answered("half", error='{"status":400,"error":{"message":"m"}}')
    assert client.status == 400 and b'"m"' in client.body


@pytest.mark.parametrize("first", [EVENT, ": keep-alive\n\n", "event: x\ndata: 1\n\n"])
async def test_events_are_relayed_as_they_are(first: str) -> None:
    client = await answered(first, EVENT, "data: [DONE]\n\n")
    assert client.headers["content-type"].startswith("text/event-stream")
    assert client.body.decode() == first + EVENT + "data: [DONE]\n\n"


async def test_an_object_among_events_becomes_one() -> None:
    assert (
        await answered(EVENT, {"y": 2}, "data: [DONE]\n\n")
    ).body == EVENT.encode() + b'data: {"y":2}\n\ndata: [DONE]\n\n'


async def test_failures() -> None:
    before = await answered(error='{"status":429,"error":{"message":"m"},"retry_after_s":2}')
    assert (before.status, before.headers["retry-after"]) == (429, "2")
    after = await answered(EVENT, error="handler: x")
    assert after.status == 200
    assert after.body.startswith(EVENT.encode() + b'data: {"error":{"message"')
    assert after.body.endswith(b"}}\n\ndata: [DONE]\n\n")
    after_done = await answered(EVENT, "data: [DONE]\n\n", error="handler: x")
    assert after_done.body.count(b"data:") == 2, "nothing follows [DONE]"


async def test_no_output_at_all_is_an_error() -> None:
    assert (await answered(aggregate=False)).status == 500


async def test_an_answer_that_came_only_with_the_end_is_used() -> None:
    broker, client = Broker(), Client()
    job = Job("j", b'{"input":{}}', 0)
    broker.submit(job, 60)
    await broker.take(broker.worker("w"), 1, 0)
    broker.done("w", "j", {"output": [{"a": 1}]}, 1)
    assert await relay.answer(job, client.send, "text/x") and client.body == b'{"a":1}'


async def queued(error: str | None) -> tuple[Client, list[int]]:
    """A stream that waits in the queue, is taken, and ends; and how many comments there were at either time."""
    broker, client = Broker(), Client()
    job = Job("j", b'{"input":{}}', 0)
    broker.submit(job, 60)
    task = asyncio.create_task(relay.answer(job, client.send, "text/x", keep_alive_s=0.05))
    await asyncio.sleep(0.18)
    counts = [client.body.count(b": keep-alive\n\n")]
    await broker.take(broker.worker("w"), 1, 0)
    await asyncio.sleep(0.12)
    counts.append(client.body.count(b": keep-alive\n\n"))
    if error is None:
        broker.chunk("w", "j", EVENT + "data: [DONE]\n\n", 1)
    broker.done("w", "j", {"error": error} if error else {"output": []}, 1)
    assert await asyncio.wait_for(task, 1) and client.ended
    return client, counts


async def test_a_stream_without_output_is_kept_alive() -> None:
    client, (in_queue, at_worker) = await queued(None)
    assert client.status == 200 and client.headers["content-type"].startswith("text/event-stream")
    assert 2 <= in_queue < at_worker
    assert client.body == b": keep-alive\n\n" * at_worker + EVENT.encode() + b"data: [DONE]\n\n"


async def test_an_error_after_that_is_an_event() -> None:
    client, _ = await queued('{"status":400,"error":{"message":"m"}}')
    assert client.status == 200
    event = client.body.replace(b": keep-alive\n\n", b"")
    assert event.startswith(b'data: {"error":{"message":"m"') and event.endswith(b"\n\ndata: [DONE]\n\n")


async def test_an_error_before_that_has_its_status() -> None:
    broker, client = Broker(), Client()
    job = Job("j", b'{"input":{}}', 0)
    broker.submit(job, 60)
    await broker.take(broker.worker("w"), 1, 0)
    task = asyncio.create_task(relay.answer(job, client.send, "text/x", keep_alive_s=1.0))
    await asyncio.sleep(0.1)
    broker.done("w", "j", {"error": '{"status":404,"error":{"message":"m"}}'}, 1)
    assert await asyncio.wait_for(task, 1) and client.status == 404


async def test_a_reader_that_takes_nothing_is_given_up() -> None:
    broker, client = Broker(), Client()
    job = Job("j", b'{"input":{}}', 0)
    broker.submit(job, 60)
    await broker.take(broker.worker("w"), 1, 0)
    broker.chunk("w", "j", EVENT, 1)
    task = asyncio.create_task(relay.answer(job, client.send, "text/x", stalled_after_s=0.05))
    await asyncio.sleep(0.01)
    client.stuck = True
    broker.chunk("w", "j", EVENT, 1)
    with pytest.raises(ClientGone):
        await asyncio.wait_for(task, 1)
    assert job.status is Status.IN_PROGRESS  # whoever runs the relay cancels it
