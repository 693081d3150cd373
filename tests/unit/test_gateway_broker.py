"""The life of jobs: who gets one, when it goes back to the queue, and that each reaches one final state."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import broker as module
from gateway.broker import Broker
from gateway.job import Job, Status
from gateway.workers import Worker
from worker.errors import RateLimited, Unavailable


def make(broker: Broker, name: str = "j", *, keep_s: float = 60, priority: int = 0, timeout_s: float = 600) -> Job:
    job = Job(name, b'{"input":{}}', broker.now, priority=priority, keep_s=keep_s, execution_timeout_s=timeout_s)
    broker.submit(job, 3600)
    return job


async def taken(broker: Broker, worker_id: str = "w", *, keep_s: float = 60) -> Job:
    job = make(broker, keep_s=keep_s)
    assert await broker.take(broker.worker(worker_id), 1, 0) == [job]
    return job


async def test_jobs_go_out_by_priority_then_by_arrival() -> None:
    broker = Broker()
    names = [("a", 1), ("b", 0), ("c", 0), ("d", -1), ("e", 1)]
    for name, priority in names:
        make(broker, name, priority=priority)
    jobs = await broker.take(broker.worker("w"), 3, 0) + await broker.take(broker.worker("w"), 9, 0)
    assert [job.id for job in jobs] == ["d", "b", "c", "a", "e"]


async def test_a_poll_waits_for_a_job_and_leaves_with_nothing_after_its_time() -> None:
    broker = Broker()
    poll = asyncio.create_task(broker.take(broker.worker("w"), 5, 5))
    await asyncio.sleep(0.01)
    job = make(broker)
    assert await asyncio.wait_for(poll, 1) == [job]
    assert await asyncio.wait_for(broker.take(broker.worker("w"), 5, 0.02), 1) == []


async def test_a_poll_cancelled_in_the_instant_of_its_wake_up_passes_the_job_on() -> None:
    broker = Broker()
    first = asyncio.create_task(broker.take(broker.worker("a"), 1, 5))
    second = asyncio.create_task(broker.take(broker.worker("b"), 1, 5))
    await asyncio.sleep(0)
    job = make(broker)
    first.cancel()
    assert await asyncio.wait_for(second, 1) == [job]


async def test_one_job_for_two_polls_goes_to_one_of_them() -> None:
    broker = Broker()
    polls = [asyncio.create_task(broker.take(broker.worker(name), 4, 0.1)) for name in "ab"]
    await asyncio.sleep(0)
    make(broker, "1")
    make(broker, "2")
    make(broker, "3")
    taken = [job.id for poll in polls for job in await poll]
    assert sorted(taken) == ["1", "2", "3"]


async def test_a_full_queue_refuses_and_a_job_that_comes_back_is_still_let_in() -> None:
    broker = Broker(max_queued=1)
    job = await taken(broker)
    make(broker, "waits")
    with pytest.raises(RateLimited) as refused:
        make(broker, "one too many")
    assert refused.value.retry_after_s is not None and 1 <= refused.value.retry_after_s <= 60
    broker.not_taken(broker.worker("w"), [job])
    assert job.status is Status.IN_QUEUE
    assert await broker.take(broker.worker("v"), 1, 0) == [job], "it keeps its place in the line"


async def test_output_and_end() -> None:
    broker = Broker()
    job = await taken(broker)
    assert broker.chunk("w", "j", "a", 1) is job
    assert broker.chunk("other", "j", "x", 1) is None
    broker.done("w", "j", {"output": ["a", "b"]}, 10)
    assert job.status is Status.COMPLETED and job.output == ["a", "b"]
    assert job.take_chunks() == ["a", "b"], "what the stream lost is repaired from the whole"
    assert broker.chunk("w", "j", "late", 1) is None
    assert broker.worker("w").unsent_stops == set()


@pytest.mark.parametrize("output", [["b", "a"], ["x"], ["b"]])
async def test_a_gap_before_chunks_that_did_arrive_is_a_failure(output: list[str]) -> None:
    broker = Broker()
    job = await taken(broker)
    broker.chunk("w", "j", "a", 1)
    broker.done("w", "j", {"output": output}, 10)
    assert job.status is Status.FAILED and "lost" in (job.error or "")


async def test_without_an_aggregate_nothing_is_compared() -> None:
    broker = Broker()
    job = await taken(broker)
    broker.chunk("w", "j", "a", 1)
    broker.done("w", "j", {"output": []}, 10)
    assert job.status is Status.COMPLETED


async def test_cancel_reaches_the_worker_once_and_again_while_pings_name_the_job() -> None:
    broker = Broker()
    job = await taken(broker)
    worker = broker.worker("w")
    poll = asyncio.create_task(worker.stops(5))
    await asyncio.sleep(0)
    broker.cancel(job)
    broker.cancel(job)
    assert await asyncio.wait_for(poll, 1) == ["j"]
    assert await worker.stops(0) == []
    broker.ping("w", {"j"}, complete=True)
    assert await worker.stops(0) == ["j"]
    broker.ping("w", set(), complete=True)
    assert await worker.stops(0) == []


async def test_a_progress_update_is_shown_and_ends_nothing() -> None:
    broker = Broker()
    job = await taken(broker)
    broker.done("w", "j", {"status": "IN_PROGRESS", "output": "half"}, 4)
    assert job.view()["status"] == "IN_PROGRESS" and job.view()["output"] == "half"


@pytest.mark.parametrize(
    ("clean", "sent", "age_s", "status"),
    [
        (False, False, 0, Status.IN_QUEUE),  # handed out a moment ago: never started
        (False, False, 5, Status.FAILED),  # its handler was waiting
        (False, True, 0, Status.FAILED),  # it has sent something
        (True, False, 5, Status.IN_QUEUE),  # an orderly end finishes all that was started
        (True, True, 5, Status.FAILED),
    ],
)
async def test_what_becomes_of_a_dead_workers_job(clean: bool, sent: bool, age_s: float, status: Status) -> None:
    broker = Broker()
    job = await taken(broker)
    assert job.started is not None
    job.started -= age_s
    if sent:
        broker.chunk("w", "j", "a", 1)
    broker.worker_gone("w", clean=clean)
    assert job.status is status
    if status is Status.FAILED:
        assert job.failure is not None and job.failure.status == 503
        return
    assert await broker.take(broker.worker("next"), 1, 0) == [job]
    broker.worker_gone("next", clean=True)
    assert job.status is Status.FAILED, "it goes back only once"


async def test_the_ping_process_of_a_dead_worker_keeps_nothing_alive() -> None:
    broker = Broker()
    worker = broker.worker("w")
    worker.polled(broker.now)
    worker.poll_ended(broker.now, broken_off=True)
    worker.contact -= 31
    broker.ping("w", set(), complete=True)
    broker.sweep()
    assert broker.workers == {}
    broker.ping("w", {"x"}, complete=True)
    assert broker.workers == {}


async def test_a_worker_whose_loop_is_busy_lives_by_its_pings() -> None:
    broker = Broker()
    worker = broker.worker("w")
    worker.polled(broker.now)
    worker.poll_ended(broker.now, broken_off=False)
    worker.contact -= 31
    broker.ping("w", set(), complete=True)
    broker.sweep()
    assert set(broker.workers) == {"w"}


@pytest.mark.parametrize(("listed_before", "status"), [(False, Status.IN_QUEUE), (True, Status.FAILED)])
async def test_a_job_that_pings_stop_naming_is_lost(listed_before: bool, status: Status) -> None:
    broker = Broker()
    job = await taken(broker)
    if listed_before:
        broker.ping("w", {"j"}, complete=True)
    for _ in range(module.MISSED_PINGS):
        assert job.status is Status.IN_PROGRESS
        broker.ping("w", set(), complete=False)
        broker.ping("w", set(), complete=True)
    assert job.status is status


async def test_limits_of_time() -> None:
    broker = Broker()
    make(broker, "limited", timeout_s=0.02)
    limited = (await broker.take(broker.worker("w"), 1, 0))[0]
    lived = Job("lived", b'{"input":{}}', broker.now, keep_s=60)
    broker.submit(lived, 0.02)
    kept = make(broker, "kept", keep_s=0.02)
    broker.cancel(kept)
    await asyncio.sleep(0.08)
    assert limited.status is Status.TIMED_OUT and await broker.worker("w").stops(0) == ["limited"]
    assert lived.status is Status.TIMED_OUT and "lived" not in broker.jobs
    assert "kept" not in broker.jobs and "limited" in broker.jobs


async def test_a_timed_out_job_is_retried_only_after_its_worker_has_let_go() -> None:
    broker = Broker()
    job = await taken(broker)
    broker._over_limit(job)
    assert not broker.may_retry(job)
    broker.worker("w").stopping["j"] -= 10
    broker.ping("w", set(), complete=True)
    assert broker.may_retry(job)
    broker.retry(job)
    assert job.status is Status.IN_QUEUE and job.error is None and broker.counts["retried"] == 1


async def test_drain_ends_everything_and_lets_polls_go() -> None:
    broker = Broker()
    running = await taken(broker)
    waiting = make(broker, "waiting")
    worker = broker.worker("w")
    idle = broker.worker("idle")
    poll = asyncio.create_task(broker.take(idle, 1, 60))
    broker.drain()
    assert running.status is Status.FAILED and waiting.status is Status.FAILED
    assert await asyncio.wait_for(poll, 1) == []
    assert await worker.stops(0) == ["j"]
    assert await asyncio.wait_for(idle.stops(0), 1) == []
    with pytest.raises(Unavailable):
        make(broker, "late")
    broker.worker_gone("w", clean=True)
    assert running.status is Status.FAILED


async def test_a_polled_job_may_leave_only_so_much_unread() -> None:
    broker = Broker()
    job = await taken(broker)
    broker.chunk("w", "j", "x", module.MAX_OUTPUT_BYTES)
    assert broker.chunk("w", "j", "x", 1) is None
    assert job.status is Status.FAILED and job.failure is not None and job.failure.status == 413
    assert await broker.worker("w").stops(0) == ["j"]


async def test_kept_results_are_bounded_in_bytes() -> None:
    broker = Broker()
    for number in range(40):
        make(broker, str(number))
        await broker.take(broker.worker("w"), 1, 0)
        broker.done("w", str(number), {"output": "x"}, 10_000_000)
    assert 20 <= len(broker.jobs) <= 27 and "39" in broker.jobs and "0" not in broker.jobs


async def test_a_job_with_a_connected_reader_makes_its_worker_wait_and_is_forgotten_at_the_end() -> None:
    broker = Broker()
    job = await taken(broker, keep_s=0)
    broker.chunk("w", "j", "x", 300_000)
    room = asyncio.create_task(job.room())
    await asyncio.sleep(0.01)
    assert not room.done()
    job.take_chunks()
    await asyncio.wait_for(room, 1)
    broker.done("w", "j", {"output": []}, 1)
    assert broker.jobs == {}


MOVES = st.lists(
    st.tuples(st.sampled_from(["submit", "take", "chunk", "done", "fail", "cancel", "gone", "ping", "retry"]),
              st.integers(0, 7)),
    max_size=60,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(MOVES)
def test_whatever_happens_the_books_balance(moves: list[tuple[str, int]]) -> None:
    asyncio.run(walk(moves))


async def walk(moves: list[tuple[str, int]]) -> None:
    broker = Broker(max_queued=5)
    jobs: list[Job] = []

    def worker() -> Worker:
        return broker.worker(f"w{len(jobs) % 2}")

    for move, number in moves:
        job = jobs[number % len(jobs)] if jobs else None
        if move == "submit":
            try:
                jobs.append(make(broker, str(len(jobs)), keep_s=number % 2 * 60, priority=number % 3))
            except RateLimited:
                assert broker.health()["jobs"]["inQueue"] == 5
        elif move == "take":
            await broker.take(worker(), number, 0)
        elif move == "gone":
            broker.worker_gone(worker().id, clean=bool(number % 2))
        elif move == "ping":
            broker.ping(worker().id, set(map(str, range(number))), complete=True)
        elif job is not None:
            act_on(broker, move, job)
        check(broker, jobs)
    broker.drain()
    assert all(job.status.final for job in jobs) and broker._limits == {}


def act_on(broker: Broker, move: str, job: Job) -> None:
    worker_id = job.worker_id or "w0"
    actions: dict[str, Any] = {
        "chunk": lambda: broker.chunk(worker_id, job.id, "x", 1),
        "done": lambda: broker.done(worker_id, job.id, {"output": []}, 2),
        "fail": lambda: broker.done(worker_id, job.id, {"error": "x"}, 2),
        "cancel": lambda: broker.cancel(job),
        "retry": lambda: (
            job.id in broker.jobs and broker.may_retry(job) and len(broker._queue) < 5 and broker.retry(job)
        ),
    }
    actions[move]()


def check(broker: Broker, jobs: list[Job]) -> None:
    running = {job.id for worker in broker.workers.values() for job in worker.jobs.values()}
    assert running == {job.id for job in jobs if job.status is Status.IN_PROGRESS} == set(broker._limits)
    assert {job.id for job in broker._queue} == {job.id for job in jobs if job.status is Status.IN_QUEUE}
    for job in jobs:
        assert (job.finished is not None) == job.status.final
        assert job.status.final or job.id in broker.jobs
        assert (job.failure is None) == (job.status in (Status.IN_QUEUE, Status.IN_PROGRESS, Status.COMPLETED))
