"""What the handler yields: when, in which form, and what happens on errors and cancels; seen through the real SDK."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.fakes.platform import Platform
from worker.delivery import MAX_YIELD_CHARS, Outbox, deliver
from worker.errors import BadRequest, RateLimited
from worker.protocol import sse


class Scripted:
    """An answer that sends what its script says: (seconds to wait first, item), and then ends or raises."""

    def __init__(self, *script: tuple[float, Any], error: Exception | None = None, events: bool = True) -> None:
        self.id = "r1"
        self.events = events
        self.script = script
        self.error = error
        self.aborted = 0
        self.ended = False

    async def run(self, send: Callable[[Any], None]) -> None:
        for delay_s, item in self.script:
            if delay_s:
                await asyncio.sleep(delay_s)
            send(item)
        if self.error is not None:
            raise self.error
        self.ended = True

    def abort(self) -> None:
        self.aborted += 1


async def yields(answer: Scripted, *, interval_s: float = 0.0, keep_alive_s: float = 0.0, post_s: float = 0.0) -> Any:
    """[(time since start, item)] as a platform whose POST takes `post_s` gets them."""
    now = asyncio.get_running_loop().time
    start, got = now(), []
    async for item in deliver(answer, interval_s=interval_s, keep_alive_s=keep_alive_s):
        got.append((now() - start, item))
        await asyncio.sleep(post_s)
    return got


def tokens(count: int, every_s: float) -> list[tuple[float, str]]:
    return [(every_s, f"data: {index}\n\n") for index in range(count)]


async def test_what_gathers_during_a_post_is_one_yield() -> None:
    got = await yields(Scripted(*tokens(20, 0.01)), post_s=0.1)
    assert got[0][1] == "data: 0\n\n"
    assert len(got) < 8
    assert "".join(item for _, item in got) == "".join(text for _, text in tokens(20, 0))


async def test_first_at_once_then_spaced_and_the_end_at_once() -> None:
    got = await yields(Scripted((0.0, "data: first\n\n"), *tokens(9, 0.02)), interval_s=10.0)
    assert [item.count("data:") for _, item in got] == [1, 9]
    assert got[0][0] < 0.1 and got[1][0] < 2.0
    got = await yields(Scripted(*tokens(12, 0.02)), interval_s=0.06)
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(got[:-1])]
    assert gaps and min(gaps) > 0.05


async def test_a_long_text_is_split_between_events() -> None:
    event = "data: " + "x" * 10_000 + "\n\n"
    got = await yields(Scripted(*[(0.0, event)] * 100))
    assert len(got) > 1 and all(len(item) <= MAX_YIELD_CHARS and item.endswith("\n\n") for _, item in got)
    assert sum(item.count("data: ") for _, item in got) == 100


async def test_a_silent_stream_gets_comments() -> None:
    got = await yields(Scripted((0.25, "data: late\n\n")), keep_alive_s=0.1)
    assert [item for _, item in got] == [": keep-alive\n\n"] * 2 + ["data: late\n\n"]
    got = await yields(Scripted((0.25, {"a": 1}), events=False), keep_alive_s=0.1)
    assert [item for _, item in got] == [{"a": 1}]


async def test_error_before_output_is_an_envelope() -> None:
    error = RateLimited("the queue is full", retry_after_s=2.5)
    for events in (True, False):
        ((_, item),) = await yields(Scripted(error=error, events=events))
        carried = json.loads(item["error"])
        assert carried == {"status": 429, "error": error.body()["error"], "retry_after_s": 2.5}


async def test_error_after_output_is_an_event_and_done() -> None:
    answer = Scripted((0.0, "data: {}\n\n"), (0.05, "data: {}\n\n"), error=BadRequest("no", param="x"))
    got = [item for _, item in await yields(answer)]
    assert "".join(got).endswith("data: {}\n\n" + sse.event(BadRequest("no", param="x").body()) + sse.DONE)
    commented = Scripted((0.2, "data: {}\n\n"), error=BadRequest("no"))
    got = [item for _, item in await yields(commented, keep_alive_s=0.15)]
    assert isinstance(got[-1], str) and got[-1].endswith(sse.DONE)  # a comment commits the status


async def test_what_was_made_but_not_yielded_before_an_error_is_dropped() -> None:
    got = await yields(Scripted((0.0, "data: role\n\n"), error=BadRequest("no")))
    assert len(got) == 1 and json.loads(got[0][1]["error"])["status"] == 400


async def test_a_bug_is_logged_and_told_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    ((_, item),) = await yields(Scripted(error=RuntimeError("boom at /srv/private")))
    carried = json.loads(item["error"])
    assert carried["status"] == 500 and "private" not in item["error"] and "r1" in carried["error"]["message"]
    assert "boom at /srv/private" in caplog.text


async def test_bodies_are_plain_json() -> None:
    import numpy

    body = {"n": numpy.int64(3), "p": float("nan"), "q": numpy.float32(0.5), "text": "a\ud800b"}
    ((_, item),) = await yields(Scripted((0.0, body), events=False))
    assert item == {"n": 3, "p": None, "q": 0.5, "text": "a�b"}
    assert json.dumps(item, allow_nan=False, ensure_ascii=False).encode("utf-8")


async def test_a_body_beyond_the_limit_is_an_error() -> None:
    ((_, item),) = await yields(Scripted((0.0, {"text": "x" * 21_000_000}), events=False))
    told = json.loads(item["error"])
    assert "20 MB" in told["error"]["message"]
    assert told["status"] == 400, "clients try again after a 500"


async def test_a_stream_beyond_the_limit_ends_with_an_error_and_is_not_cut_silently() -> None:
    event = "data: " + "x" * 999_990 + "\n\n"
    answer = Scripted(*[(0.0, event)] * 25)
    items = [item for _, item in await yields(answer)]
    *sent, last = items
    assert sum(map(len, sent)) <= 20_000_000 < sum(map(len, sent)) + MAX_YIELD_CHARS
    assert '"answer_too_large"' in last and last.endswith("\n\ndata: [DONE]\n\n") and answer.aborted


async def test_an_event_that_is_too_long_for_a_yield_is_cut_and_nothing_is_lost() -> None:
    text = "data: " + "é🦊" * 400_000 + "\n\n"
    items = [item for _, item in await yields(Scripted((0.0, text), (0.0, "data: 2\n\n")))]
    assert "".join(items) == text + "data: 2\n\n"
    assert max(len(json.dumps(item, ensure_ascii=False).encode()) for item in items) < 1_000_000


async def test_outbox_keeps_order_and_kinds() -> None:
    outbox = Outbox()
    for item in ("a", "b", {"c": 1}, "d"):
        outbox.send(item)
    outbox.close()
    taken = []
    while outbox:
        taken.append(outbox.take())
    assert taken == ["ab", {"c": 1}, "d"]
    assert await outbox.wait(None)


class TestThroughTheSdk:
    """runpod's own job functions, against a real HTTP server."""

    @pytest.fixture
    async def platform(self) -> AsyncIterator[Platform]:
        async with Platform() as platform:
            yield platform

    async def run(self, platform: Platform, answer: Scripted) -> Any:
        async def handler(job: dict[str, Any]) -> AsyncIterator[Any]:
            async for item in deliver(answer, interval_s=0.0, keep_alive_s=0.0):
                yield item

        return await platform.run(handler, {})

    async def test_error_stays_json(self, platform: Platform) -> None:
        error = BadRequest('it\'s "too" long', param="messages", code="context_length_exceeded")
        done = await self.run(platform, Scripted(error=error))
        assert json.loads(done["error"]) == {"status": 400, **error.body()}

    async def test_stream_is_aggregated_whole(self, platform: Platform) -> None:
        done = await self.run(platform, Scripted(*tokens(5, 0.01)))
        assert "".join(done["output"]) == "".join(text for _, text in tokens(5, 0))
        assert [chunk["output"] for chunk in platform.chunks] == done["output"]

    async def test_one_body_is_a_list_of_one(self, platform: Platform) -> None:
        done = await self.run(platform, Scripted((0.0, {"object": "x"}), events=False))
        assert done["output"] == [{"object": "x"}]

    @pytest.mark.parametrize("where", ["waiting", "posting"])
    async def test_cancel_reaches_the_engine_at_once(self, platform: Platform, where: str) -> None:
        answer = Scripted((0.0, "data: 1\n\n"), (60.0, "data: 2\n\n"))
        platform.post_s = 2.0 if where == "posting" else 0.0
        before = asyncio.all_tasks()
        task = asyncio.create_task(self.run(platform, answer))
        await asyncio.sleep(0.2)
        assert len(platform.chunks) == 1 and not answer.aborted
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert answer.aborted and not answer.ended
        assert platform.done == []
        await asyncio.sleep(0.05)
        assert not [t for t in asyncio.all_tasks() - before if "_produce" in repr(t)]


async def test_the_engine_is_told_to_stop_before_the_error_is_yielded() -> None:
    answer = Scripted(error=BadRequest("no"))
    await anext(deliver(answer, interval_s=0.0, keep_alive_s=0.0))
    assert answer.aborted
