"""The page pool and its prefix cache, against a slow reference that remembers whole token prefixes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pages import PagePool, Prefix, pack

A, B, C = ([letter * 100 + i for i in range(4)] for letter in (1, 2, 3))  # the tokens of one page each
NAMESPACE = ("",)


def fill(pool: PagePool, tokens: list[int], namespace: Prefix = NAMESPACE) -> list[int]:
    """What a sequence does: takes what is cached, computes the rest, registers its full pages. -> its pages"""
    match = pool.match(namespace, tokens)
    pool.share(match.pages)
    pages = match.pages + pool.allocate(pool.pages_for(len(tokens)) - len(match.pages))
    prefix, size = match.prefix, pool.page_size
    for index in range(len(match.pages), len(tokens) // size):
        prefix = pool.register(pages[index], (prefix, pack(tokens[index * size : (index + 1) * size])))
    return pages


def cached(pool: PagePool, tokens: list[int], namespace: Prefix = NAMESPACE) -> int:
    return len(pool.match(namespace, [*tokens, 0]).pages)  # one token more: the last one is never matched


def test_a_prefix_is_found_again_page_by_page() -> None:
    pool = PagePool(8, 4)
    pages = fill(pool, A + B + [1])
    assert pool.match(NAMESPACE, A + B + [9]).pages == pages[:2]
    assert pool.match(NAMESPACE, A + C).pages == pages[:1]
    assert pool.match(NAMESPACE, C + A).pages == []


def test_the_last_token_is_never_matched() -> None:
    pool = PagePool(8, 4)
    pages = fill(pool, A + B)
    assert pool.match(NAMESPACE, A).pages == []
    assert pool.match(NAMESPACE, A + B).pages == pages[:1]
    assert pool.match(NAMESPACE, A + B + [1]).pages == pages[:2]
    assert pool.match(NAMESPACE, [5]).pages == [] and pool.match(NAMESPACE, []).pages == []


def test_the_same_tokens_at_another_place_are_other_content() -> None:
    pool = PagePool(8, 4)
    fill(pool, A + B)
    assert cached(pool, C + B + A) == 0
    assert cached(pool, B) == 0
    assert cached(pool, A + A) == 1


@pytest.mark.parametrize(
    ("one", "other"), [(("ab", "c"), ("a", "bc")), (("", "abc"), ("abc", "")), (("a|b", ""), ("a", "b"))]
)
def test_parts_of_a_namespace_never_run_into_each_other(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    pool = PagePool(8, 4)
    fill(pool, A, one)
    assert cached(pool, A, one) == 1
    assert cached(pool, A, other) == 0


def test_a_collision_of_hashes_never_gives_the_pages_of_other_tokens() -> None:
    pool = PagePool(8, 4)
    page = pool.allocate(1)[0]
    assert hash((-1, pack(A))) == hash((-2, pack(A))), "CPython: hash(-1) == hash(-2)"
    pool.register(page, (-1, pack(A)))
    assert cached(pool, A, -1) == 1
    assert cached(pool, A, -2) == 0


def test_pages_in_use_are_shared_and_freed_only_by_the_last() -> None:
    pool = PagePool(4, 4)
    first, second = fill(pool, [*A, 1]), fill(pool, [*A, 2])
    assert first[0] == second[0] and first[1] != second[1]
    pool.free(first)
    assert pool.num_free == 2, "the shared page is still in use"
    assert second[0] not in pool.allocate(2)
    pool.free(second)
    pool.check()
    assert pool.num_free == 2


def test_blank_pages_are_used_before_cached_ones() -> None:
    pool = PagePool(3, 4)
    pool.free(fill(pool, A))
    pool.allocate(2)
    assert cached(pool, A) == 1
    pool.allocate(1)
    assert cached(pool, A) == 0
    pool.check()


def test_the_least_recently_used_content_goes_first() -> None:
    pool = PagePool(3, 4)
    for tokens in (A, B, C):
        pool.free(fill(pool, tokens))
    pool.free(fill(pool, [*A, 1])[:1])  # A is used once more; takes the page of B for its tail
    assert (cached(pool, A), cached(pool, B), cached(pool, C)) == (1, 0, 1)


def test_a_prefix_outlives_its_tail() -> None:
    pool = PagePool(3, 4)
    pool.free(fill(pool, A + B + C))
    pool.allocate(1)
    assert cached(pool, A + B + C) == 2
    pool.allocate(1)
    assert cached(pool, A + B + C) == 1


def test_content_computed_twice_stays_with_its_first_page() -> None:
    pool = PagePool(4, 4)
    one, two = pool.allocate(2)
    assert pool.register(one, (NAMESPACE, pack(A))) == pool.register(two, (NAMESPACE, pack(A)))
    assert pool.match(NAMESPACE, [*A, 0]).pages == [one]
    pool.free([two])
    pool.free([one])
    pool.check()
    assert (pool.num_free, pool.num_cached) == (4, 1)


def test_reset_forgets_what_nobody_uses() -> None:
    pool = PagePool(8, 4)
    used = fill(pool, [*A, 1])
    pool.free(fill(pool, A + B))
    pool.free(fill(pool, C))
    pool.reset_cache()
    pool.check()
    assert (cached(pool, A + B), cached(pool, C)) == (1, 0)
    pool.free(used)
    assert pool.num_free == 8


def test_forgotten_pages_are_not_found_by_anybody() -> None:
    pool = PagePool(8, 4)
    pages = fill(pool, A + B + [1])
    pool.forget(pages)
    assert cached(pool, A + B) == 0
    pool.check()
    pool.free(pages)
    pool.check()
    assert (pool.num_free, pool.num_cached) == (8, 0)


def test_without_caching_nothing_is_found() -> None:
    pool = PagePool(8, 4, enable_prefix_caching=False)
    assert pool.match(NAMESPACE, A + B).next_key is None
    fill(pool, [1, 2, 3])
    assert pool.match(NAMESPACE, [1, 2, 3]).pages == []


def test_check_sees_a_page_freed_twice() -> None:
    pool = PagePool(4, 4)
    pages = pool.allocate(1)
    pool.free(pages)
    pool.free(pages)
    with pytest.raises(AssertionError):
        pool.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([6, 10, 40]), st.sampled_from([1, 2, 4]))
def test_random_walk_against_whole_prefixes(seed: int, num_pages: int, page_size: int) -> None:
    """Few tokens and few pages, so that prefixes meet and pages are evicted all the time. The reference knows the
    whole content that was computed into each page."""
    rng = random.Random(seed)
    pool = PagePool(num_pages, page_size)
    content: dict[int, tuple[Prefix, list[int]]] = {}
    sequences: list[list[int]] = []
    for _ in range(120):
        move = rng.random()
        if move < 0.6:
            namespace = (rng.choice(["", "x"]),)
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4 * page_size))]
            match = pool.match(namespace, tokens)
            assert len(match.pages) * page_size < len(tokens)
            for index, page in enumerate(match.pages):
                assert content[page] == (namespace, tokens[: (index + 1) * page_size])
            needed = pool.pages_for(len(tokens)) - len(match.pages)
            if needed + pool.num_unused(match.pages) > pool.num_free:
                continue
            pages = fill(pool, tokens, namespace)
            assert pages[: len(match.pages)] == match.pages
            assert not {page for other in sequences for page in other} & set(pages[len(match.pages) :])
            for index in range(len(match.pages), len(tokens) // page_size):
                content[pages[index]] = (namespace, tokens[: (index + 1) * page_size])
            sequences.append(pages)
        elif move < 0.97 and sequences:
            pool.free(sequences.pop(rng.randrange(len(sequences))))
        elif move > 0.98:
            pool.reset_cache()
        pool.check()
    for pages in sequences:
        pool.free(pages)
    pool.check()
    assert pool.num_free == num_pages


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12))
def test_without_eviction_every_whole_page_is_found_again(prompts: list[list[int]]) -> None:
    pool = PagePool(200, 2)
    for prompt in prompts:
        pool.free(fill(pool, prompt))
    known = {tuple(prompt[:n]) for prompt in prompts for n in range(2, len(prompt) + 1, 2)}
    for prompt in prompts:
        longest = max((n for n in range(2, len(prompt), 2) if tuple(prompt[:n]) in known), default=0)
        assert len(pool.match(NAMESPACE, prompt).pages) == longest // 2
