"""Who computes how many tokens in the next step.

There is no prefill phase and no decode phase: a sequence has tokens that are known and tokens that are computed,
and every step closes part of the gap under one token budget.

1. Running sequences that lack one token (decode), best first, so that no long prompt can starve them.
2. With the rest of the budget, best first: running sequences that lack more (a prompt computed in chunks), and
   waiting ones while there is a place in the batch and pages for all their known tokens.

Best = smallest (priority, arrival). When pages run out, the worst running sequence gives all of its own back and
waits again under its old order (preemption by recompute: tokens and grammar stay). The best one is therefore
never disturbed, and since no sequence may grow beyond the whole pool, it ends: there is no livelock.

A waiting sequence whose next whole page is being computed by a running one follows it, that is, waits until
their common prefix is computed or the leader stops running, instead of computing it a second time.

A step costs O(batch): waiting and following sequences are not looked at, and a head of the queue that does not
fit is not tried again before enough pages are free. Knows no torch, no messages, no tokens' meaning.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from engine.pages import Match, PageKey, PagePool, pack
from engine.sequence import Sequence, State


@dataclass(slots=True)
class Part:
    """Compute the tokens [start, start + count) of a sequence."""

    seq: Sequence
    start: int
    count: int
    samples: bool  # draw the next token; False while further known tokens are left to compute


@dataclass(slots=True)
class Plan:
    """What one forward pass computes. Every sequence in it has pages for all of its known tokens."""

    parts: tuple[Part, ...]
    num_tokens: int


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order


class Scheduler:
    """`on_release(seq)` is called when a sequence has lost its pages: preempted, or finished after running."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        on_release: Callable[[Sequence], None],
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # Pages that an admission leaves free for the growth of those that run, or it would soon be preempted.
        self.watermark = max(1, pool.num_pages // 100)
        self.running: list[Sequence] = []  # best first
        self.num_waiting = 0  # following ones included
        self.num_preemptions = 0
        self.cache_queries = self.cache_hits = 0  # prompt tokens looked up and found, counted once a sequence
        self._on_release = on_release
        self._heap: list[tuple[tuple[int, int], Sequence]] = []  # of the waiting; finished ones are skipped
        self._num_stale = 0  # finished ones still in the heap
        self._num_following = 0  # each will want a place in the batch: no more than there are
        self._computing: dict[PageKey, Sequence] = {}  # next whole page of a running sequence -> that one
        self._blocked: tuple[Sequence, int] | None = None  # the head of the queue and the free pages it needs

    def add(self, seq: Sequence) -> None:
        self.num_waiting += 1
        self._enqueue(seq)

    def remove(self, seq: Sequence) -> None:
        """The sequence is over, in whatever state. Not while a step that computes it is in flight."""
        if seq.state is State.RUNNING:
            del self.running[bisect_left(self.running, seq.order, key=_order)]
            self._release(seq)
        else:
            self.num_waiting -= 1
            if seq.leader is not None:
                self._unfollow(seq, seq.leader)
            else:
                self._num_stale += 1
        seq.state = State.FINISHED
        if self._num_stale > len(self._heap) // 2 + 16:
            self._heap = [entry for entry in self._heap if entry[1].state is State.WAITING]
            heapq.heapify(self._heap)
            self._num_stale = 0

    def plan(self) -> Plan | None:
        """The parts of the next step; None if there is nothing to compute."""
        parts: list[Part] = []
        budget = self._plan_decodes(parts, self.max_num_batched_tokens)
        for seq in [seq for seq in self.running if seq.num_computed + 1 < len(seq.token_ids)]:
            budget = self._plan_admissions(parts, budget, better_than=seq.order)
            budget = self._plan_part(parts, seq, budget)
        budget = self._plan_admissions(parts, budget)
        return Plan(tuple(parts), self.max_num_batched_tokens - budget) if parts else None

    def advance(self, plan: Plan) -> None:
        """The plan has been computed: its full pages become findable, and followers are woken."""
        page_size, caching = self.pool.page_size, self.pool.caching
        for part in plan.parts:
            seq = part.seq
            seq.num_computed = part.start + part.count
            if caching and seq.num_computed // page_size > seq.num_registered:
                self._register(seq)

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. For tests and idle moments."""
        self.pool.check()
        held = {page for seq in self.running for page in seq.pages}
        assert self.pool.num_free == self.pool.num_pages - len(held), "a page is held by nobody, or by one that waits"
        assert self.running == sorted(self.running, key=_order), "the running are out of order"
        assert all(seq.state is State.RUNNING for seq in [*self.running, *self._computing.values()])
        queued = [seq for _, seq in self._heap if seq.state is State.WAITING]
        assert len(set(queued)) == len(queued) == len(self._heap) - self._num_stale, "the queue is miscounted"
        following = [seq for leader in self.running for seq in leader.followers]
        assert len(following) == self._num_following and len(queued) + len(following) == self.num_waiting
        assert all(seq.state is State.FOLLOWING and not seq.pages for seq in following)

    # ---- the makings of a plan; each returns the budget that is left

    def _plan_decodes(self, parts: list[Part], budget: int) -> int:
        page_size, running = self.pool.page_size, self.running
        index = 0
        while budget and index < len(running):
            seq = running[index]
            num_tokens = len(seq.token_ids)
            if seq.num_computed + 1 == num_tokens:
                if len(seq.pages) * page_size < num_tokens and not self._grow(seq):
                    break  # it was the last one, and has been preempted
                parts.append(Part(seq, seq.num_computed, 1, seq.params.max_tokens > 0))
                budget -= 1
            index += 1
        return budget

    def _plan_admissions(self, parts: list[Part], budget: int, better_than: tuple[int, int] | None = None) -> int:
        while budget and len(self.running) + self._num_following < self.max_num_seqs and (seq := self._head()):
            if better_than is not None and seq.order > better_than:
                break
            if self._blocked and self._blocked[0] is seq and self.running and self.pool.num_free < self._blocked[1]:
                break
            match = self._match(seq)
            if match.next_key is not None and (leader := self._computing.get(match.next_key)):
                self._follow(seq, leader, len(match.pages))
                continue
            needed = self.pool.pages_for(seq.num_tokens) - len(match.pages) + self.pool.num_unused(match.pages)
            needed += self.watermark if self.running else 0
            if needed > self.pool.num_free:
                self._blocked = (seq, needed)
                break
            self._admit(seq, match)
            budget = self._plan_part(parts, seq, budget)
        return budget

    @staticmethod
    def _plan_part(parts: list[Part], seq: Sequence, budget: int) -> int:
        missing = len(seq.token_ids) - seq.num_computed
        count = min(missing, budget)
        if count:
            parts.append(Part(seq, seq.num_computed, count, count == missing and seq.params.max_tokens > 0))
        return budget - count

    # ---- the queue

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = State.WAITING
        heapq.heappush(self._heap, (seq.order, seq))

    def _head(self) -> Sequence | None:
        """The best waiting sequence."""
        while self._heap and self._heap[0][1].state is not State.WAITING:
            heapq.heappop(self._heap)
            self._num_stale -= 1
        return self._heap[0][1] if self._heap else None

    def _match(self, seq: Sequence) -> Match:
        # The logits of a cached prompt token are not there any more: they have to be computed.
        if seq.wants_prompt_logprobs:
            return Match([], seq.namespace, None)
        return self.pool.match(seq.namespace, seq.token_ids)

    def _follow(self, seq: Sequence, leader: Sequence, num_pages: int) -> None:
        """`num_pages` leading pages are computed already, and at least the next one is common to both."""
        heapq.heappop(self._heap)
        size, ours, theirs = self.pool.page_size, seq.token_ids, leader.token_ids
        last = min(len(ours) - 1, len(theirs)) // size
        common = num_pages + 1
        while common < last and ours[(page := slice(common * size, (common + 1) * size))] == theirs[page]:
            common += 1
        leader.followers[seq] = common * size
        seq.leader, seq.state = leader, State.FOLLOWING
        self._num_following += 1

    def _unfollow(self, seq: Sequence, leader: Sequence) -> None:
        del leader.followers[seq]
        seq.leader = None
        self._num_following -= 1

    def _wake(self, leader: Sequence, num_computed: int | None = None) -> None:
        """Back to the queue with the followers whose common prefix is computed; with all if None."""
        woken = [seq for seq, goal in leader.followers.items() if num_computed is None or goal <= num_computed]
        for seq in woken:
            self._unfollow(seq, leader)
            self._enqueue(seq)

    # ---- pages

    def _admit(self, seq: Sequence, match: Match) -> None:
        heapq.heappop(self._heap)
        self._blocked = None
        self.num_waiting -= 1
        self.pool.share(match.pages)
        seq.pages = match.pages + self.pool.allocate(self.pool.pages_for(seq.num_tokens) - len(match.pages))
        seq.num_registered, seq.prefix = len(match.pages), match.prefix
        seq.num_computed = len(match.pages) * self.pool.page_size
        if seq.cached_tokens is None:  # not when it comes back after preemption
            seq.cached_tokens, seq.admitted_at = seq.num_computed, monotonic()
            if self.pool.caching:
                self.cache_queries += seq.num_prompt
                self.cache_hits += seq.num_computed
        seq.state = State.RUNNING
        insort(self.running, seq, key=_order)
        self._lead(seq)

    def _grow(self, seq: Sequence) -> bool:
        """One page more, if need be at the cost of worse sequences; False if it is itself the worst."""
        while not self.pool.num_free:
            victim = self.running.pop()
            self.num_preemptions += 1
            self.num_waiting += 1
            self._release(victim)
            self._enqueue(victim)
            if victim is seq:
                return False
        seq.pages += self.pool.allocate(1)
        return True

    def _register(self, seq: Sequence) -> None:
        """All pages of the sequence that are computed become findable."""
        size = self.pool.page_size
        self._unlead(seq)
        full = seq.num_computed // size
        for index in range(seq.num_registered, full):
            tokens = pack(seq.token_ids[index * size : (index + 1) * size])
            seq.prefix = self.pool.register(seq.pages[index], (seq.prefix, tokens))
        seq.num_registered = full
        self._lead(seq)
        if seq.followers:
            self._wake(seq, seq.num_computed)

    def _release(self, seq: Sequence) -> None:
        """Give all pages back; nothing of the sequence is computed any more."""
        self._unlead(seq)
        self._wake(seq)
        self.pool.free(seq.pages)
        seq.pages = []
        seq.num_computed = seq.num_registered = 0
        seq.prefix = seq.namespace
        seq.prompt_logprobs = []
        self._on_release(seq)

    def _lead(self, seq: Sequence) -> None:
        """Its next whole page of known tokens, if there is one, can be followed from now on."""
        if (key := self._next_key(seq)) is not None:
            self._computing.setdefault(key, seq)

    def _unlead(self, seq: Sequence) -> None:
        if (key := self._next_key(seq)) is not None and self._computing.get(key) is seq:
            del self._computing[key]

    def _next_key(self, seq: Sequence) -> PageKey | None:
        start, size = seq.num_registered * self.pool.page_size, self.pool.page_size
        if not self.pool.caching or start + size > len(seq.token_ids):
            return None
        return seq.prefix, pack(seq.token_ids[start : start + size])
