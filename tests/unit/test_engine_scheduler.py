"""Plans: who gets how many tokens. The sequences here are moved by hand, as the core would."""

from __future__ import annotations

from typing import Any

import pytest

from engine.pages import Match, PagePool, Prefix
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, State
from tests.fakes.driver import request


class CountingPool(PagePool):
    """Counts how often a prompt is looked up."""

    num_matches = 0

    def match(self, namespace: Prefix, token_ids: list[int]) -> Match:
        self.num_matches += 1
        return super().match(namespace, token_ids)


class Bench:
    """A scheduler with pages of 4 tokens, and sequences by name. `settle` plays runner and core: the next token of
    a sequence is always 1."""

    def __init__(self, num_pages: int = 100, max_num_seqs: int = 16, budget: int = 64, caching: bool = True) -> None:
        self.pool = CountingPool(num_pages, 4, caching)
        self.released: list[str] = []
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            on_release=lambda seq: self.released.append(seq.request.id),
        )
        self.seqs: dict[str, Sequence] = {}

    def add(self, name: str, prompt: Any = None, length: int = 4, **options: Any) -> Sequence:
        """Without a prompt, one that shares no page with any other."""
        prompt = list(prompt or [1000 * (len(self.seqs) + 1) + i for i in range(length)])
        seq = Sequence(request(name, prompt, 100, **options), arrival=len(self.seqs), seed=0)
        self.seqs[name] = seq
        self.scheduler.add(seq)
        return seq

    def plan(self) -> dict[str, tuple[int, int]]:
        """Plans and settles one step. -> {name: (start, count)}, in the order of the plan"""
        plan = self.scheduler.plan()
        if plan is None:
            return {}
        self.settle(plan)
        return {part.seq.request.id: (part.start, part.count) for part in plan.parts}

    def settle(self, plan: Plan) -> None:
        assert plan.num_tokens == sum(part.count for part in plan.parts) <= self.scheduler.max_num_batched_tokens
        self.scheduler.advance(plan)
        for part in plan.parts:
            if part.samples:
                part.seq.token_ids.append(1)
        self.scheduler.check()

    def running(self) -> list[str]:
        return [seq.request.id for seq in self.scheduler.running]


# ---- the budget


def test_a_long_prompt_is_computed_in_chunks() -> None:
    bench = Bench(budget=10)
    bench.add("long", length=24)
    assert [bench.plan() for _ in range(4)] == [
        {"long": (0, 10)},
        {"long": (10, 10)},
        {"long": (20, 4)},
        {"long": (24, 1)},
    ]


def test_only_the_last_chunk_samples() -> None:
    bench = Bench(budget=10)
    bench.add("long", length=20)
    for expected in (False, True):
        plan = bench.scheduler.plan()
        assert plan and [part.samples for part in plan.parts] == [expected]
        bench.settle(plan)


def test_decodes_never_starve_behind_a_long_prompt() -> None:
    bench = Bench(budget=10)
    bench.add("short")
    bench.plan()
    bench.add("long", length=40)
    for step in range(4):
        assert bench.plan() == {"short": (4 + step, 1), "long": (9 * step, 9)}


def test_prompts_and_decodes_share_a_step() -> None:
    bench = Bench(budget=20)
    bench.add("a", length=7)
    bench.add("b", length=7)
    bench.add("c", length=12)
    assert bench.plan() == {"a": (0, 7), "b": (0, 7), "c": (0, 6)}
    assert bench.plan() == {"a": (7, 1), "b": (7, 1), "c": (6, 6)}


def test_no_more_sequences_than_places() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abc":
        bench.add(name)
    assert list(bench.plan()) == ["a", "b"]
    bench.scheduler.remove(bench.seqs["a"])
    assert list(bench.plan()) == ["b", "c"]


# ---- order


def test_waiting_sequences_start_by_priority_then_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", priority=5)
    bench.plan()
    bench.add("b", priority=5)
    bench.add("c", priority=0)
    bench.add("d", priority=5)
    started = []
    while bench.scheduler.running:
        started += bench.running()
        bench.scheduler.remove(bench.scheduler.running[0])
        bench.plan()
    assert started == ["a", "c", "b", "d"]


def test_a_better_request_does_not_wait_for_the_chunks_of_a_worse_prompt() -> None:
    bench = Bench(budget=10)
    bench.add("batch job", length=100, priority=1)
    bench.plan()
    bench.add("question", length=6, priority=0)
    assert bench.plan() == {"question": (0, 6), "batch job": (10, 4)}


def test_equal_priority_never_overtakes() -> None:
    bench = Bench(budget=10)
    bench.add("first", length=30)
    bench.plan()
    bench.add("second", length=6)
    assert bench.plan() == {"first": (10, 10)}


# ---- pages


def test_admission_waits_for_pages_for_the_whole_prompt_and_keeps_some_for_growth() -> None:
    bench = Bench(num_pages=5)
    bench.add("a", length=8)  # 2 pages
    bench.add("b", length=12)  # 3 pages: all that is left, but then neither could grow
    assert list(bench.plan()) == ["a"]
    bench.add("c", length=4)  # would fit, but came after b
    assert list(bench.plan()) == ["a"]


def test_a_prompt_as_large_as_the_pool_is_admitted_when_nothing_runs() -> None:
    bench = Bench(num_pages=5)
    bench.add("a", length=19)
    assert list(bench.plan()) == ["a"]


def victims(*arrivals: tuple[str, int], pages: int) -> list[str]:
    """Runs sequences of 4 tokens, a page each, in a pool that is full; the first one then grows. -> who gave way"""
    bench = Bench(num_pages=pages + 1)
    for name, priority in arrivals:
        bench.add(name, length=3, priority=priority)
    while len(bench.scheduler.running) == len(arrivals) or not bench.released:
        bench.plan()
    return bench.released


def test_the_victim_is_the_lowest_priority_then_the_latest() -> None:
    assert victims(("old", 1), ("mid", 1), ("new", 2), pages=3)[:1] == ["new"]
    assert victims(("new", 2), ("mid", 1), ("old", 1), pages=3)[:1] == ["new"]
    assert victims(("old", 1), ("mid", 1), ("new", 1), pages=3)[:1] == ["new"]


def test_preemption_keeps_tokens_and_frees_pages() -> None:
    bench = Bench(num_pages=4, caching=False)
    old, new = bench.add("old", length=3), bench.add("new", length=3)
    while not bench.released:
        bench.plan()
    assert bench.released == ["new"] and new.state is State.WAITING
    assert (new.pages, new.num_computed) == ([], 0)
    assert new.num_output > 0 and new.token_ids[:3] == list(new.request.prompt_ids)
    assert old.state is State.RUNNING


def test_a_preempted_sequence_comes_back_before_later_arrivals() -> None:
    bench = Bench(num_pages=4, caching=False)
    bench.add("old", length=3)
    bench.add("new", length=3)
    bench.add("late", length=11)
    while not bench.released:
        bench.plan()
    bench.scheduler.remove(bench.seqs["old"])
    bench.plan()
    assert bench.running() == ["new"]


def test_the_best_sequence_is_never_preempted_by_another() -> None:
    bench = Bench(num_pages=6, caching=False)
    for name in "abcd":
        bench.add(name, length=3)
    for _ in range(20):
        bench.plan()
        assert "a" not in bench.released


# ---- the queue costs nothing


def test_a_head_of_the_queue_that_does_not_fit_is_not_looked_up_every_step() -> None:
    bench = Bench(num_pages=20)
    bench.add("a", length=40)
    bench.add("big", length=60)
    for _ in range(10):
        bench.plan()
    assert bench.pool.num_matches <= 2
    bench.scheduler.remove(bench.seqs["a"])
    assert list(bench.plan()) == ["big"]


def test_a_blocked_head_does_not_block_a_better_one() -> None:
    bench = Bench(num_pages=20)
    bench.add("a", length=40)
    bench.add("big", length=60)
    bench.plan()
    bench.add("urgent", length=4, priority=-1)
    assert list(bench.plan()) == ["a", "urgent"]


def test_aborted_waiting_sequences_do_not_pile_up() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("running")
    bench.plan()
    for count in range(500):
        bench.scheduler.remove(bench.add(f"r{count}"))
        bench.scheduler.check()
    assert len(bench.scheduler._heap) <= 40


# ---- following


PROMPT = list(range(100, 124))  # 6 pages
LONG = list(range(100, 140))


def test_a_prefix_that_is_being_computed_is_not_computed_twice() -> None:
    bench = Bench()
    bench.add("leader", PROMPT)
    choices = [bench.add(f"choice {i}", PROMPT) for i in range(3)]
    bench.add("half", [*PROMPT[:8], *range(50, 60)])
    bench.add("other")
    assert bench.plan() == {"leader": (0, 24), "other": (0, 4)}
    step = bench.plan()
    assert step["choice 0"] == step["choice 1"] == step["choice 2"] == (20, 4)
    assert step["half"] == (8, 10)
    assert all(seq.cached_tokens == 20 for seq in choices)


def test_a_follower_waits_for_the_common_prefix_only() -> None:
    """Better ones follow a worse one that needs several steps."""
    bench = Bench(budget=10)
    bench.add("leader", LONG, priority=1)
    bench.plan()
    same, half = bench.add("same", LONG), bench.add("half", [*LONG[:16], *range(50, 60)])
    assert bench.plan() == {"leader": (10, 10)}
    assert (same.state, half.state) == (State.FOLLOWING, State.WAITING), "the 16 tokens of 'half' are computed"
    assert bench.plan() == {"half": (16, 10)}
    assert bench.plan() == {"half": (26, 1), "leader": (20, 9)}
    assert bench.plan() == {"half": (27, 1), "leader": (29, 9)}
    assert bench.plan() == {"half": (28, 1), "same": (36, 4), "leader": (38, 2)}


def test_followers_go_on_when_the_leader_is_removed() -> None:
    bench = Bench(budget=10)
    leader = bench.add("leader", LONG, priority=1)
    bench.plan()
    one, two = bench.add("one", LONG), bench.add("two", LONG)
    bench.plan()
    assert one.leader is two.leader is leader
    bench.scheduler.remove(leader)
    bench.scheduler.check()
    assert bench.plan() == {"one": (20, 10)}, "the pages that the leader has computed are there"
    bench.plan()
    assert bench.plan()["two"] == (36, 4)


def test_followers_go_on_when_the_leader_is_preempted() -> None:
    bench = Bench(num_pages=16, budget=10)
    bench.add("best", length=3, priority=-1)
    leader = bench.add("leader", LONG, priority=1)
    bench.plan()
    follower = bench.add("follower", LONG)
    bench.plan()
    assert follower.leader is leader
    bench.pool.allocate(bench.pool.num_free)  # somebody else takes what is left, and 'best' grows
    while not bench.released:
        plan = bench.scheduler.plan()
        assert plan is not None
        bench.scheduler.advance(plan)
        bench.seqs["best"].token_ids.append(1)
    assert bench.released == ["leader"] and leader.state is State.WAITING
    assert follower.leader is None and not leader.followers


def test_a_follower_can_be_removed() -> None:
    bench = Bench(budget=10)
    leader = bench.add("leader", LONG, priority=1)
    bench.plan()
    follower = bench.add("follower", LONG)
    bench.plan()
    assert follower.leader is leader
    bench.scheduler.remove(follower)
    bench.scheduler.check()
    assert not leader.followers and bench.scheduler.num_waiting == 0


def test_other_namespaces_do_not_follow() -> None:
    bench = Bench(budget=60)
    bench.add("a", PROMPT, cache_salt="x")
    bench.add("b", PROMPT, cache_salt="y")
    assert bench.plan() == {"a": (0, 24), "b": (0, 24)}


def test_no_more_followers_than_places() -> None:
    """A burst of thousands costs a step as much as the batch is wide, not as much as the queue is long."""
    bench = Bench(max_num_seqs=4)
    for count in range(1000):
        bench.add(f"r{count}", PROMPT)
    bench.plan()
    assert bench.pool.num_matches == 4
    for _ in range(5):
        bench.plan()
    assert bench.running() == ["r0", "r1", "r2", "r3"]
    assert bench.pool.num_matches <= 8


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_need_every_token_computed(caching: bool) -> None:
    bench = Bench(caching=caching)
    bench.add("first", PROMPT)
    bench.plan()
    bench.add("second", PROMPT, prompt_logprobs=0)
    assert bench.plan()["second"] == (0, 24)
    assert bench.seqs["second"].cached_tokens == 0


def test_evicted_pages_are_not_believed_to_be_there() -> None:
    """A lookup for a sequence that then has to wait promises nothing."""
    bench = Bench(num_pages=8)
    bench.add("p", PROMPT)
    bench.plan()
    bench.scheduler.remove(bench.seqs["p"])
    bench.add("wide", range(500, 510))
    bench.plan()
    bench.add("q", PROMPT)  # six pages of it are cached, but there is no room for all it needs
    bench.plan()
    assert bench.seqs["q"].state is State.WAITING
    for _ in range(18):
        bench.plan()  # 'wide' grows and evicts the cached pages
    bench.scheduler.remove(bench.seqs["wide"])
    step = bench.plan()
    assert step["q"] == (bench.seqs["q"].cached_tokens, 24 - (bench.seqs["q"].cached_tokens or 0))
    assert (bench.seqs["q"].cached_tokens or 0) < 20
