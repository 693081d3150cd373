"""The client against the real engine process with a scripted runner."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient, EngineDead, EngineProcess, RequestStream
from engine.messages import EngineConfig, EngineInfo, FinishReason, GrammarSpec, SequenceOutput, Stats
from tests.fakes import small_tokenizers
from tests.fakes.driver import request

Start = Callable[..., tuple[EngineProcess, EngineInfo]]

SLOW = 7000  # prompts with this id get a token every 10 ms
SCRIPT = {"rules": [{"match": [SLOW], "delay_s": 0.01}]}


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts scripted engines; stops them at the end."""
    processes: list[EngineProcess] = []

    def launch(script: dict[str, Any] = SCRIPT, **config: Any) -> tuple[EngineProcess, EngineInfo]:
        os.environ["SCRIPTED_ENGINE"] = json.dumps(script)
        processes.append(EngineProcess.launch(EngineConfig("none", **config), module="tests.fakes.scripted_engine"))
        return processes[-1], processes[-1].wait_ready()

    yield launch
    for process in processes:
        process.stop()


@pytest.fixture(scope="module")
def engine(start: Start) -> tuple[EngineProcess, EngineInfo]:
    """One for all tests that do not end it."""
    return start()


@pytest.fixture
async def client(engine: tuple[EngineProcess, EngineInfo]) -> AsyncIterator[EngineClient]:
    client = EngineClient(*engine)
    yield client
    stats = await idle(client)
    assert stats.num_free_pages == stats.num_pages
    await client.close()


async def idle(client: EngineClient) -> Stats:
    """Waits until the engine has nothing left to do."""
    while (stats := await client.stats()).num_running or stats.num_waiting:
        await asyncio.sleep(0.01)
    return stats


async def read(stream: RequestStream) -> tuple[list[int], SequenceOutput]:
    outputs = [output async for output in stream]
    assert [output.finish is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return [token for output in outputs for token in output.token_ids], outputs[-1]


async def test_tokens_come_one_after_the_other(client: EngineClient) -> None:
    tokens, last = await read(client.submit(request("r", [1, 2, 3], 5)))
    assert (tokens, last.finish) == ([4, 5, 6, 7, 8], FinishReason.LENGTH)


async def test_each_reader_gets_its_own_tokens_in_whatever_order_they_read(client: EngineClient) -> None:
    streams = [client.submit(request(f"r{i}", [i * 100], 20 + i)) for i in range(8)]
    for i in reversed(range(8)):
        tokens, _ = await asyncio.wait_for(read(streams[i]), 5)
        assert tokens == list(range(i * 100 + 1, i * 100 + 21 + i))


async def test_a_reader_that_does_not_read_holds_up_nobody(client: EngineClient) -> None:
    idle = client.submit(request("idle", [0], 1000))
    assert len((await read(client.submit(request("busy", [5000], 1000))))[0]) == 1000
    tokens, _ = await read(idle)
    assert tokens == list(range(1, 1001))


async def test_tokens_that_were_not_read_yet_are_merged(client: EngineClient) -> None:
    stream = client.submit(request("r", [0], 50))
    await idle(client)
    outputs = stream.pending()
    assert [token for output in outputs for token in output.token_ids] == list(range(1, 51))
    assert len(outputs) == 3, "the first (with its counts), all between, the last (with its reason)"
    assert stream.pending() == []
    assert [output async for output in stream] == []


async def test_pending_does_not_wait(client: EngineClient) -> None:
    stream = client.submit(request("r", [SLOW], 5))
    assert stream.pending() == []
    first = await anext(stream)
    assert first.token_ids == (SLOW + 1,)


async def test_abort_ends_the_stream_once_and_may_be_repeated(client: EngineClient) -> None:
    stream = client.submit(request("r", [SLOW], 1000))
    await anext(stream)
    for _ in range(3):
        client.abort("r")
    _, last = await read(stream)
    assert last.finish is FinishReason.ABORT
    client.abort("r")
    client.abort("nobody")
    assert stream.pending() == []


async def test_abort_right_after_submit(client: EngineClient) -> None:
    stream = client.submit(request("r", [SLOW], 1000))
    client.abort("r")
    _, last = await read(stream)
    assert last.finish is FinishReason.ABORT


async def test_others_go_on_after_an_abort(client: EngineClient) -> None:
    streams = {i: client.submit(request(f"r{i}", [SLOW, i * 50], 30)) for i in range(4)}
    await anext(streams[0])
    client.abort("r0")
    client.abort("r2")
    for i in (1, 3):
        assert (await read(streams[i]))[0] == list(range(i * 50 + 1, i * 50 + 31))


async def test_the_same_id_twice_is_refused_without_disturbing_the_first(client: EngineClient) -> None:
    first, second = client.submit(request("r", [SLOW], 5)), client.submit(request("r", [1], 5))
    _, refusal = await read(second)
    assert refusal.error is not None and refusal.error.code == "duplicate_id"
    assert len((await read(first))[0]) == 5


async def test_a_refusal_is_the_streams_only_output(client: EngineClient) -> None:
    tokens, last = await read(client.submit(request("r", range(5000), 5)))
    assert tokens == []
    assert last.error is not None and last.error.code == "prompt_too_long"


async def test_an_error_of_one_request(start: Start) -> None:
    client = EngineClient(*start({"rules": [{"match": [9], "error_after": 3}]}))
    bad, good = client.submit(request("bad", [9], 10)), client.submit(request("good", [1], 10))
    tokens, last = await read(bad)
    assert (len(tokens), last.finish) == (3, FinishReason.ERROR)
    assert len((await read(good))[0]) == 10
    await client.close()


async def test_a_grammar_is_compiled_while_the_engine_sleeps_and_wakes_it(start: Start, tmp_path: Path) -> None:
    tokenizer = small_tokenizers.byte_level_bpe()
    small_tokenizers.save(tokenizer, tmp_path)
    word = tokenizer.encode("ab", add_special_tokens=False).ids
    client = EngineClient(*start({"rules": [{"token_ids": word}]}, tokenizer_path=str(tmp_path)))
    stream = client.submit(request("r", [1], 100, grammar=GrammarSpec("regex", "ab")))
    tokens, last = await asyncio.wait_for(read(stream), 30)
    assert (tokens, last.finish) == (word, FinishReason.STOP)
    await client.close()


async def test_a_thousand_requests_at_once(start: Start) -> None:
    client = EngineClient(*start(max_num_seqs=64, max_num_queued=900))
    streams = [client.submit(request(f"r{i}", [i * 40], 10)) for i in range(1000)]
    ends = [await asyncio.wait_for(read(stream), 30) for stream in streams]
    refused = [last.error for _, last in ends if last.error]
    assert all(error.code == "queue_full" and error.retry_after_s for error in refused)
    assert len(refused) <= 100
    assert all(
        tokens == list(range(i * 40 + 1, i * 40 + 11)) for i, (tokens, last) in enumerate(ends) if not last.error
    )
    stats = await client.stats()
    assert stats.max_batch == 64 and stats.num_free_pages == stats.num_pages
    await client.close()


async def test_500_requests_with_random_cancels_leave_neither_pages_nor_memory(start: Start) -> None:
    client = EngineClient(*start(num_pages=300, max_num_seqs=32))
    rng = random.Random(0)

    async def one(name: str) -> FinishReason | None:
        stream = client.submit(request(name, [rng.randrange(1000) for _ in range(rng.randrange(1, 200))], 40))
        outputs = []
        async for output in stream:
            outputs.append(output)
            if rng.random() < 0.02:
                client.abort(name)
        assert [output.finish is not None for output in outputs].count(True) == 1
        return outputs[-1].finish

    resident = []
    for half in range(2):
        ends = await asyncio.gather(*[one(f"{half}-{i}") for i in range(250)])
        assert set(ends) <= {FinishReason.ABORT, FinishReason.LENGTH}
        stats = await idle(client)
        assert stats.num_free_pages == stats.num_pages
        resident.append(stats.rss_bytes)
    assert sum(stats.finished.values()) == 500 and stats.finished["abort"] > 0
    assert resident[1] - resident[0] < 5e6
    await client.close()


async def test_stats_and_reset_answer_in_turn(client: EngineClient) -> None:
    await client.reset_prefix_cache()
    await read(client.submit(request("r", range(64), 1)))
    before, _, after = await asyncio.gather(client.stats(), client.reset_prefix_cache(), client.stats())
    assert (before.num_cached_pages, after.num_cached_pages) == (4, 0)


async def test_a_cancelled_question_does_not_shift_the_answers(client: EngineClient) -> None:
    question = asyncio.ensure_future(client.reset_prefix_cache())
    await asyncio.sleep(0)
    question.cancel()
    assert (await client.stats()).num_running == 0


async def test_a_reader_that_is_cancelled_leaves_the_stream_usable(client: EngineClient) -> None:
    stream = client.submit(request("r", [SLOW], 10))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await anext(stream)
    assert len((await read(stream))[0]) == 10


async def test_close_ends_open_streams_and_aborts_their_requests(engine: tuple[EngineProcess, EngineInfo]) -> None:
    client = EngineClient(*engine)
    before = await client.stats()
    stream = client.submit(request("r", [SLOW], 1000))
    await anext(stream)
    await client.close()
    await client.close()
    assert (await read(stream))[1].finish is FinishReason.ABORT
    assert (await read(client.submit(request("late", [1], 5))))[1].finish is FinishReason.ERROR
    second = EngineClient(*engine)
    after = await idle(second)
    assert after.finished["abort"] == before.finished.get("abort", 0) + 1
    await second.close()


def test_a_client_in_each_of_two_loops(engine: tuple[EngineProcess, EngineInfo]) -> None:
    """Objects of one event loop never hang in another: the next loop makes its own client, and the first one, never
    closed, takes no answer away from it."""
    clients = []

    async def one_job() -> list[int]:
        clients.append(EngineClient(*engine))
        tokens, _ = await read(clients[-1].submit(request("r", [1], 20)))
        return tokens

    assert asyncio.run(one_job()) == asyncio.run(one_job()) == list(range(2, 22))


def test_a_client_says_so_when_used_from_another_loop(engine: tuple[EngineProcess, EngineInfo]) -> None:
    async def make() -> EngineClient:
        return EngineClient(*engine)

    async def use(client: EngineClient) -> None:
        client.submit(request("r", [1], 3))

    client = asyncio.run(make())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(use(client))


async def test_the_event_loop_stays_free_while_tokens_arrive(client: EngineClient) -> None:
    """Hundreds of streams that nobody reads, and a timer that must not be late by much."""
    for i in range(200):
        client.submit(request(f"r{i}", [i], 300))
    late = []
    while (stats := await client.stats()).num_running or stats.num_waiting:
        began = time.monotonic()
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - began - 0.01)
    assert sorted(late)[len(late) // 2] < 0.1


async def test_questions_to_a_dead_engine(start: Start) -> None:
    process, info = start()
    client = EngineClient(process, info)
    waiting = asyncio.ensure_future(client.stats())
    process.stop()
    await asyncio.wait_for(client.dead.wait(), 5)
    with pytest.raises(EngineDead):
        await client.stats()
    (answer,) = await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 1)
    assert isinstance(answer, (Stats, EngineDead)), "never left waiting"
    await client.close()
