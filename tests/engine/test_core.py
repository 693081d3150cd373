"""EngineCore with a runner that counts: every request ends once, gets its own tokens, and leaves nothing behind,
whatever the chunks, the pool, the company or the aborts."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar import Grammar, GrammarError
from engine.messages import (
    Abort,
    FinishReason,
    GetStats,
    GrammarSpec,
    Request,
    RequestError,
    ResetPrefixCache,
    Stats,
)
from engine.scheduler import Plan
from engine.sequence import Sampled, SequenceFailure
from tests.fakes.driver import Driver, request
from tests.fakes.runners import CountingRunner


def engine(runner: dict[str, Any] | None = None, **config: Any) -> Driver:
    return Driver(CountingRunner(**(runner or {})), **config)


def runner_of(driver: Driver) -> CountingRunner:
    runner = driver.core._runner
    assert isinstance(runner, CountingRunner)
    return runner


def counted(prompt: list[int], count: int) -> list[int]:
    """What CountingRunner answers."""
    return [(prompt[-1] + k + 1) % 1000 for k in range(count)]


def workload(seed: int, count: int, longest: int = 60) -> list[Request]:
    """Prompts with common beginnings, of very different lengths, some with priorities and tenants."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(1000) for _ in range(longest)] for _ in range(3)]
    requests = []
    for index in range(count):
        common = rng.choice(beginnings)[: rng.randrange(longest)]
        prompt = common + [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
        requests.append(
            request(
                f"r{index}",
                prompt,
                max_tokens=rng.choice([1, 2, 5, 30, 60]),
                priority=rng.choice([0, 0, 0, 1, -1]),
                cache_salt=rng.choice(["", "", "tenant"]),
                stop_token_ids=frozenset({rng.randrange(1000)}),
            )
        )
    return requests


def answers(requests: list[Request], runner: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    driver = engine(runner, **config)
    driver.send(*requests)
    driver.run(20_000)
    driver.check_idle()
    return {r.id: (driver.tokens(r.id), driver.finish(r.id), driver.final(r.id).stop_token_id) for r in requests}


# ---- the answer does not depend on how it is computed


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**9))
def test_same_answers_whatever_the_schedule(seed: int) -> None:
    requests = workload(seed, 12)
    plain = answers(requests, enable_prefix_caching=False)
    alone = {name: answer for r in requests for name, answer in answers([r]).items()}
    assert plain == alone
    assert plain == answers(requests)
    assert plain == answers(requests, max_num_batched_tokens=1, max_num_seqs=3)
    assert plain == answers(requests, max_num_batched_tokens=7)
    assert plain == answers(requests, max_num_seqs=1)
    assert plain == answers(requests, {"num_pages": 9})  # one sequence fits, several do not
    assert plain == answers(requests, {"num_pages": 9}, enable_prefix_caching=False, max_num_batched_tokens=7)
    assert plain == answers(requests, {"num_pages": 160, "page_size": 1})


def test_the_small_pool_of_the_test_above_preempts() -> None:
    driver = engine({"num_pages": 9})
    driver.send(*workload(1, 12))
    driver.run(20_000)
    assert driver.core.stats().num_preemptions > 0


def test_requests_share_steps() -> None:
    driver = engine()
    driver.send(*[request(f"r{i}", [i * 30 + 1], 8) for i in range(32)])
    driver.run()
    assert driver.core.stats().max_batch == 32
    assert driver.num_steps == 8


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([9, 20, 200]), st.sampled_from([1, 16, 256]))
def test_aborts_at_random_times_leave_nothing(seed: int, num_pages: int, budget: int) -> None:
    rng = random.Random(seed)
    requests = workload(seed, 30)
    aborted: set[str] = set()

    def abort_one() -> None:
        name = rng.choice(requests).id
        aborted.add(name)
        driver.send(Abort(name))

    class Interrupting(CountingRunner):
        def launch(self, plan: Plan) -> Plan:  # an abort while the step is in flight
            if rng.random() < 0.2:
                abort_one()
            return super().launch(plan)

    driver = Driver(Interrupting(num_pages=num_pages), max_num_batched_tokens=budget, max_num_seqs=8)
    queue = list(requests)
    for _ in range(5000):
        if queue and rng.random() < 0.7:
            driver.send(queue.pop(0))
        if rng.random() < 0.2:
            abort_one()
        driver.step()
        driver.core.scheduler.check()
        if not queue and not driver.core.has_work:
            break
    driver.run()
    driver.check_idle()
    for r in requests:
        expected = counted(list(r.prompt_ids), r.params.max_tokens)
        tokens = driver.tokens(r.id)
        assert tokens == expected[: len(tokens)]
        assert driver.finish(r.id) is not FinishReason.ABORT or r.id in aborted


def test_500_requests_with_cancels_leave_nothing() -> None:
    rng = random.Random(5)
    driver = engine({"num_pages": 40}, max_num_seqs=16)
    for number, r in enumerate(workload(5, 500)):
        driver.send(r)
        driver.step()
        if number % 3 == 0:
            driver.send(Abort(f"r{rng.randrange(number + 1)}"))
    driver.run(20_000)
    driver.check_idle()
    assert len({driver.final(f"r{i}").request_id for i in range(500)}) == 500
    assert sum(driver.core.stats().finished.values()) == 500


# ---- pages run out


def test_a_sequence_that_outgrows_the_pool_ends_with_length() -> None:
    driver = engine({"num_pages": 4})
    driver.send(request("r", range(40), 100))
    driver.run(200)
    assert driver.finish("r") is FinishReason.LENGTH
    assert len(driver.tokens("r")) == 64 - 40
    driver.check_idle()


def test_four_sequences_in_a_pool_for_two_all_finish() -> None:
    driver = engine({"num_pages": 8})
    driver.send(*[request(f"r{i}", range(i * 100, i * 100 + 20), 40) for i in range(4)])
    driver.run(1000)
    assert [len(driver.tokens(f"r{i}")) for i in range(4)] == [40] * 4
    assert driver.core.stats().num_preemptions > 0
    driver.check_idle()


def test_a_prompt_longer_than_the_token_budget_is_computed_in_chunks() -> None:
    driver = engine({"max_model_len": 1000}, max_num_batched_tokens=256)
    driver.send(request("r", range(700), 2))
    driver.run()
    assert [plan.num_tokens for plan in runner_of(driver).plans] == [256, 256, 188, 1]
    assert driver.tokens("r") == [700, 701]


def test_a_shared_page_is_not_freed_under_the_other_sequence() -> None:
    driver = engine({"num_pages": 8})
    driver.send(request("r1", range(40), 30), request("r2", range(40), 20))
    driver.step()
    driver.step()
    driver.send(Abort("r1"), request("r3", range(500, 560), 20))
    driver.run()
    assert driver.tokens("r2") == counted([39], 20)
    assert driver.final("r2").finish is FinishReason.LENGTH
    driver.check_idle()


# ---- the prefix cache


@pytest.mark.parametrize(("length", "cached"), [(16, 0), (31, 16), (32, 16), (48, 32), (49, 48)])
def test_cached_tokens_are_those_not_computed(length: int, cached: int) -> None:
    """A prompt that is cached as a whole still computes at least one token, to have logits."""
    driver = engine()
    driver.send(request("first", range(length), 1))
    driver.run()
    before = runner_of(driver).num_computed
    driver.send(request("second", range(length), 1))
    driver.run()
    assert driver.outputs["first"][0].cached_tokens == 0
    assert driver.outputs["second"][0].cached_tokens == cached == length - (runner_of(driver).num_computed - before)
    assert driver.tokens("first") == driver.tokens("second")
    stats = driver.core.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (2 * length, cached)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * length, cached)


def test_choices_of_one_prompt_compute_it_once() -> None:
    driver = engine()
    driver.send(*[request(f"choice {i}", range(100, 200), 5, choice=i) for i in range(8)])
    driver.run()
    assert [driver.outputs[f"choice {i}"][0].cached_tokens for i in range(8)] == [0] + [96] * 7


def test_output_is_cached_for_the_next_turn_of_a_conversation() -> None:
    driver = engine()
    driver.send(request("first", range(20), 30))
    driver.run()
    driver.send(request("second", [*range(50), 7, 7], 1))
    driver.run()
    assert driver.outputs["second"][0].cached_tokens == 48


def test_another_tenant_learns_nothing_from_the_cache() -> None:
    driver = engine()
    driver.send(request("one", range(64), 1, cache_salt="a"))
    driver.run()
    driver.send(request("two", range(64), 1, cache_salt="b"), request("three", range(64), 1))
    driver.run()
    assert driver.outputs["two"][0].cached_tokens == driver.outputs["three"][0].cached_tokens == 0


def test_reset_prefix_cache() -> None:
    driver = engine()
    driver.send(request("one", range(64), 1))
    driver.run()
    driver.send(ResetPrefixCache())
    driver.step()
    assert driver.messages[-1] == ResetPrefixCache()
    driver.send(request("two", range(64), 1))
    driver.run()
    assert driver.outputs["two"][0].cached_tokens == 0
    driver.check_idle()


# ---- what ends a request


def test_max_tokens_0_computes_the_prompt_only() -> None:
    driver = engine({}, max_num_batched_tokens=16)
    driver.send(request("r", range(40), 0))
    driver.run()
    assert (driver.tokens("r"), driver.finish("r")) == ([], FinishReason.LENGTH)
    assert runner_of(driver).num_computed == 40
    driver.check_idle()


def test_the_context_ends_a_request() -> None:
    driver = engine({"max_model_len": 50})
    driver.send(request("r", range(40), 100))
    driver.run()
    assert (len(driver.tokens("r")), driver.finish("r")) == (10, FinishReason.LENGTH)


def test_the_stop_token_is_delivered_and_named() -> None:
    driver = engine()
    driver.send(request("r", [5], 100, stop_token_ids=frozenset({8, 9})))
    driver.run()
    assert driver.tokens("r") == [6, 7, 8]
    assert (driver.finish("r"), driver.final("r").stop_token_id) == (FinishReason.STOP, 8)


def test_drafted_tokens_after_the_end_are_dropped() -> None:
    class Drafting(CountingRunner):
        def collect(self, plan: Plan) -> list[Sampled]:
            results = super().collect(plan)
            for result in results:
                result.token_ids += [result.token_ids[0] + 1, result.token_ids[0] + 2]
                result.logprobs = None
            return results

    driver = Driver(Drafting())
    driver.send(request("r", [5], 100, stop_token_ids=frozenset({7})))
    driver.step()
    assert (driver.tokens("r"), driver.final("r").stop_token_id) == ([6, 7], 7)


def test_abort_of_a_finished_or_unknown_request_does_nothing() -> None:
    driver = engine()
    driver.send(request("r", range(20), 1))
    driver.step()
    assert driver.finish("r") is FinishReason.LENGTH
    driver.send(Abort("r"), Abort("r"), Abort("nobody"))
    driver.step()
    assert len(driver.outputs["r"]) == 1 and "nobody" not in driver.outputs
    driver.check_idle()


def test_an_abort_during_the_last_step_of_a_request_ends_it_once() -> None:
    class Late(CountingRunner):
        def collect(self, plan: Plan) -> list[Sampled]:
            driver.send(Abort("r"))
            return super().collect(plan)

    driver = Driver(Late())
    driver.send(request("r", range(20), 1))
    driver.step()
    assert driver.finish("r") is FinishReason.ABORT and driver.tokens("r") == []
    driver.check_idle()


def test_pages_of_an_aborted_request_are_not_free_while_the_step_is_in_flight() -> None:
    class Watching(CountingRunner):
        def collect(self, plan: Plan) -> list[Sampled]:
            driver.send(Abort("r"))
            driver.core._take_commands()
            assert driver.core.pool.num_free < driver.core.pool.num_pages
            return super().collect(plan)

    driver = Driver(Watching())
    driver.send(request("r", range(20), 5))
    driver.step()
    driver.check_idle()


def test_an_aborted_prompt_leaves_what_it_computed_to_the_cache() -> None:
    driver = engine({}, max_num_batched_tokens=32)
    driver.send(request("r", range(100), 5))
    driver.step()
    driver.send(Abort("r"))
    driver.step()
    driver.send(request("again", range(100), 5))
    driver.run()
    assert driver.outputs["again"][0].cached_tokens == 32


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [
        ([], 5, "invalid_request"),
        ([1, 1000], 5, "invalid_request"),
        ([-1], 5, "invalid_request"),
        (range(50), 5, "prompt_too_long"),  # no room for a single token
        (range(51), 0, "prompt_too_long"),
        (range(600), 5, "prompt_too_long"),
    ],
)
def test_refused_at_once(prompt: Any, max_tokens: int, code: str) -> None:
    driver = engine({"max_model_len": 50})
    driver.send(request("bad", prompt, max_tokens), request("good", [1], 2))
    driver.step()
    error = driver.final("bad").error
    assert error is not None and error.code == code and error.message
    driver.run()
    assert driver.tokens("good") == [2, 3]
    driver.check_idle()


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": frozenset({1000})},
        {"logit_bias": ((-1, 1.0),)},
        {"allowed_token_ids": (1, 5000)},
        {"bad_words": ((1,), (2, 1000))},
        {"logprob_token_ids": (1000,)},
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_name(options: dict[str, Any]) -> None:
    driver = engine()
    driver.send(request("r", [1], 5, **options))
    driver.run()
    error = driver.final("r").error
    assert error is not None and error.code == "invalid_request" and next(iter(options)) in error.message


@pytest.mark.parametrize(("prompt", "max_tokens"), [(range(49), 5), (range(50), 0)])
def test_just_not_too_long(prompt: Any, max_tokens: int) -> None:
    driver = engine({"max_model_len": 50})
    driver.send(request("r", prompt, max_tokens))
    driver.run()
    assert driver.finish("r") is FinishReason.LENGTH


def test_a_prompt_longer_than_the_pool_is_refused_and_not_stuck() -> None:
    driver = engine({"num_pages": 2})
    driver.send(request("r", range(33), 5))
    driver.step()
    error = driver.final("r").error
    assert error is not None and error.code == "prompt_too_long" and "31" in error.message


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    driver = engine({}, max_num_seqs=1, max_num_queued=3)
    driver.send(*[request(f"r{i}", [i], 3) for i in range(3)])
    driver.step()
    driver.send(*[request(f"s{i}", [i], 3) for i in range(2)])
    driver.step()
    error = driver.final("s1").error
    assert error is not None and error.code == "queue_full"
    assert error.retry_after_s is not None and error.retry_after_s >= 1
    driver.run()
    assert all(driver.finish(name) is FinishReason.LENGTH for name in ("r0", "r1", "r2", "s0"))


def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on() -> None:
    driver = engine()
    driver.send(request("r", [1], 5))
    driver.step()
    driver.send(request("r", [100], 5))
    driver.run()
    (refusal,) = [output for output in driver.outputs["r"] if output.error]
    assert refusal.error is not None and refusal.error.code == "duplicate_id"
    assert driver.tokens("r") == [2, 3, 4, 5, 6]
    driver.check_idle()


# ---- faults of one request, and of all


def test_an_error_of_one_sequence_ends_that_one_alone() -> None:
    class Failing(CountingRunner):
        def collect(self, plan: Plan) -> list[Sampled]:
            results = super().collect(plan)
            for result in results:
                if result.seq.request.id == "bad" and result.seq.num_output == 2:
                    result.error = RequestError("internal_error", "The logits are not a number.")
            return results

    driver = Driver(Failing())
    driver.send(request("bad", range(40), 9), request("good", range(40), 9))
    driver.run()
    assert driver.final("bad").error == RequestError("internal_error", "The logits are not a number.")
    assert driver.tokens("good") == counted([39], 9)
    driver.check_idle()
    driver.send(request("next", range(40), 1))
    driver.run()
    assert driver.outputs["next"][0].cached_tokens == 0, "pages that may hold broken values are not reused"


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_sequence_that_breaks_the_step_ends_and_the_step_is_done_again(where: str) -> None:
    class Failing(CountingRunner):
        def _check(self, plan: Plan) -> None:
            for part in plan.parts:
                if part.seq.request.id == "bad":
                    raise SequenceFailure(part.seq, RequestError("internal_error", "no"))

        def launch(self, plan: Plan) -> Plan:
            if where == "launch":
                self._check(plan)
            return super().launch(plan)

        def collect(self, plan: Plan) -> list[Sampled]:
            self._check(plan)
            return super().collect(plan)

    driver = Driver(Failing(), max_num_seqs=3)
    driver.send(*[request(name, range(40), 5) for name in ("a", "bad", "b", "c", "d")])
    driver.run()
    assert driver.finish("bad") is FinishReason.ERROR
    assert all(driver.tokens(name) == counted([39], 5) for name in "abcd")
    driver.check_idle()


def test_any_other_exception_ends_the_engine() -> None:
    class Broken(CountingRunner):
        def collect(self, plan: Plan) -> list[Sampled]:
            raise RuntimeError("device lost")

    driver = Driver(Broken())
    driver.send(request("r", [1], 5))
    with pytest.raises(RuntimeError, match="device lost"):
        driver.step()


# ---- logprobs


@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_prompt_logprobs_come_once_and_whole(budget: int) -> None:
    driver = engine({}, max_num_batched_tokens=budget)
    for name in ("first", "again"):  # the second time the prompt is in the cache, its logprobs are not
        driver.send(request(name, range(100, 140), 3, prompt_logprobs=2, logprobs=1))
        driver.run()
        first, *rest = driver.outputs[name]
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        assert [entry.token_ids[0] for entry in first.prompt_logprobs if entry] == list(range(101, 140))
        assert all(output.prompt_logprobs is None for output in rest)
        assert [output.logprobs[0].token_ids[0] for output in (first, *rest) if output.logprobs] == [140, 141, 142]
        assert first.cached_tokens == 0


def test_prompt_logprobs_survive_preemption() -> None:
    driver = engine({"num_pages": 6}, max_num_batched_tokens=3)
    driver.send(request("best", range(30), 50), request("r", range(100, 146), 9, prompt_logprobs=0))
    while not driver.core.stats().num_preemptions:
        driver.step()
    assert "r" not in driver.outputs, "its prompt was half computed"
    driver.run()
    whole = [output.prompt_logprobs for output in driver.outputs["r"] if output.prompt_logprobs is not None]
    assert len(whole) == 1 and len(whole[0]) == 46


def test_prompt_logprobs_without_output() -> None:
    driver = engine({}, max_num_batched_tokens=7)
    driver.send(request("r", range(100, 140), 0, prompt_logprobs=0))
    driver.run()
    final = driver.final("r")
    assert final.prompt_logprobs is not None and len(final.prompt_logprobs) == 40


# ---- grammars


class Word(Grammar):
    """Allows exactly the tokens of a word, one after the other."""

    def __init__(self, *word: int) -> None:
        self.left = list(word)

    @property
    def done(self) -> bool:
        return not self.left

    def accept(self, token: int) -> bool:
        if self.left and self.left[0] == token:
            self.left.pop(0)
            return True
        return False


SPEC = GrammarSpec("regex", "x")


def test_a_complete_grammar_ends_the_request() -> None:
    driver = Driver(CountingRunner(), lambda spec: Word(6, 7))
    driver.send(request("r", [5], 100, grammar=SPEC))
    driver.run()
    assert (driver.tokens("r"), driver.finish("r")) == ([6, 7], FinishReason.STOP)
    assert driver.final("r").stop_token_id is None


def test_the_stop_token_is_not_the_grammars_business() -> None:
    driver = Driver(CountingRunner(), lambda spec: Word(6, 99))
    driver.send(request("r", [5], 100, grammar=SPEC, stop_token_ids=frozenset({7})))
    driver.run()
    assert driver.finish("r") is FinishReason.STOP


def test_output_outside_the_grammar_ends_that_request_alone() -> None:
    driver = Driver(CountingRunner(), lambda spec: Word(6, 99))
    driver.send(request("r", [5], 100, grammar=SPEC), request("free", [5], 4))
    driver.run()
    error = driver.final("r").error
    assert error is not None and error.code == "grammar_failed"
    assert driver.tokens("free") == [6, 7, 8, 9]


def test_a_grammar_that_crashes_ends_that_request_alone() -> None:
    class Crashing(Word):
        def accept(self, token: int) -> bool:
            raise RuntimeError("matcher")

    driver = Driver(CountingRunner(), lambda spec: Crashing())
    driver.send(request("r", [5], 100, grammar=SPEC), request("free", [5], 4))
    driver.run()
    error = driver.final("r").error
    assert error is not None and error.code == "grammar_failed"
    assert driver.finish("free") is FinishReason.LENGTH


def test_a_grammar_that_does_not_compile_is_refused() -> None:
    def refuse(spec: GrammarSpec) -> Grammar:
        raise GrammarError("too large")

    driver = Driver(CountingRunner(), refuse)
    driver.send(request("r", [5], 100, grammar=SPEC))
    driver.run()
    assert driver.final("r").error == RequestError("grammar_failed", "too large")


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    driver = Driver(CountingRunner(), lambda spec: Word(6))
    driver.grammars_are_slow = True
    driver.send(request("r", [5], 100, grammar=SPEC), request("free", [5], 4))
    for _ in range(4):
        driver.step()
    assert driver.finish("free") is FinishReason.LENGTH and "r" not in driver.outputs
    assert not driver.core.has_work, "the engine sleeps until the grammar is there"
    driver.finish_grammars()
    driver.step()
    assert driver.tokens("r") == [6]
    driver.check_idle()


def test_abort_while_the_grammar_is_compiled() -> None:
    driver = Driver(CountingRunner(), lambda spec: Word(6))
    driver.grammars_are_slow = True
    driver.send(request("r", [5], 100, grammar=SPEC))
    driver.step()
    driver.send(Abort("r"))
    driver.step()
    assert driver.finish("r") is FinishReason.ABORT
    driver.finish_grammars()
    driver.step()
    assert len(driver.outputs["r"]) == 1
    driver.check_idle()


def test_requests_whose_grammar_is_compiled_count_as_waiting() -> None:
    driver = Driver(CountingRunner(), lambda spec: Word(6), max_num_queued=2)
    driver.grammars_are_slow = True
    driver.send(*[request(f"r{i}", [5], 100, grammar=SPEC) for i in range(3)])
    driver.step()
    error = driver.final("r2").error
    assert error is not None and error.code == "queue_full"
    driver.finish_grammars()
    driver.run()
    assert driver.tokens("r0") == driver.tokens("r1") == [6]


def test_a_preempted_sequence_keeps_its_grammar() -> None:
    grammars = {"r": Word(*range(140, 180))}
    driver = Driver(CountingRunner(num_pages=8), lambda spec: grammars[spec.source], max_num_batched_tokens=30)
    driver.send(request("best", range(60), 60), request("r", range(100, 140), 100, grammar=GrammarSpec("regex", "r")))
    driver.run()
    assert driver.core.stats().num_preemptions > 0
    assert (driver.tokens("r"), driver.finish("r")) == (list(range(140, 180)), FinishReason.STOP)


# ---- seeds and statistics


def test_seeds_are_the_requests_own_or_drawn_and_different() -> None:
    def seeds(seed: int) -> list[int]:
        driver = engine({}, seed=seed)
        driver.send(request("a", [1], 1), request("b", [1], 1), request("c", [1], 1, seed=7))
        driver.step()
        return [part.seq.seed for part in runner_of(driver).plans[0].parts]

    first, again, other = seeds(0), seeds(0), seeds(1)
    assert first == again != other
    assert len(set(first)) == 3 and first[2] == 7


def test_stats() -> None:
    driver = engine({}, max_num_seqs=2)
    driver.send(*[request(f"r{i}", range(i * 100, i * 100 + 20), 3) for i in range(3)])
    driver.step()
    driver.send(GetStats())
    driver.step()
    (stats,) = [message for message in driver.messages if isinstance(message, Stats)]
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_pages, stats.num_free_pages, stats.num_cached_pages) == (64, 60, 2)
    driver.run()
    stats = driver.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 0, 64)
    assert (stats.prompt_tokens, stats.generation_tokens) == (60, 9)
    assert (stats.num_steps, stats.max_batch, stats.finished) == (6, 2, {"length": 3})
    assert set(stats.step_s) == {"plan", "launch", "collect", "commit"}
    assert stats.rss_bytes > 1_000_000


def test_times_of_a_request_come_with_its_first_output() -> None:
    class Slow(CountingRunner):
        def collect(self, plan: Plan) -> list[Sampled]:
            time.sleep(0.02)
            return super().collect(plan)

    driver = Driver(Slow(), max_num_seqs=1, max_num_batched_tokens=16)
    driver.send(request("first", range(100, 140), 4), request("second", range(200, 210), 2))
    driver.run()
    for name, queue_s, prefill_s in (("first", 0.0, 0.06), ("second", 0.12, 0.02)):
        first, *rest = driver.outputs[name]
        assert first.queue_s == pytest.approx(queue_s, abs=0.015) and first.prefill_s == pytest.approx(
            prefill_s, abs=0.015
        )
        assert all(output.queue_s is None and output.prefill_s is None for output in rest)
    driver.send(request("refused", [], 1))
    driver.step()
    assert driver.final("refused").queue_s is None


def test_the_runner_is_told_when_a_sequence_is_over() -> None:
    driver = engine()
    driver.send(request("a", [1], 2), request("b", [1], 5))
    driver.run()
    assert [seq.request.id for seq in runner_of(driver).forgotten] == ["a", "b"]
