"""The page pool: which pages of the KV cache are free, shared, or kept for a later request with the same prefix.

A page holds the keys and values of `page_size` consecutive tokens. It is in exactly one of three places:

    used     referenced by one or more sequences
    cached   referenced by nobody, full, and findable by its content: counts as free, reused last, oldest first
    blank    referenced by nobody, its content of no use

The prefix cache names the content of a page by (prefix, tokens), where prefix stands for everything before it:
for a first page the namespace of the request, for a later one the serial number of the page before. Serial
numbers are never used twice. So the names form a hash chain in a plain dict, hashed once a page; and since a
dict compares the whole key on a hit, a collision of hashes can never give the pages of other tokens.

Knows page numbers only: no tensors, no sequences, no policy.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

Prefix = tuple[str, ...] | int  # a namespace, or the serial number of the last page of the prefix
PageKey = tuple[Prefix, bytes]  # the prefix and the page's own tokens, packed


def pack(token_ids: list[int]) -> bytes:
    """Tokens as bytes, 4 each: a seventh of the memory of a tuple of ints, and hashed faster."""
    return array("i", token_ids).tobytes()


@dataclass(frozen=True, slots=True)
class Match:
    """What the prefix cache holds of a prompt."""

    pages: list[int]  # the longest run of cached pages, from the first token on
    prefix: Prefix  # names their content
    next_key: PageKey | None  # the first page that is not cached; None if no further whole page can be used


class PagePool:
    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.caching = enable_prefix_caching
        self._refs = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, least recently used first
        self._index: dict[PageKey, int] = {}  # content -> page, used or cached
        self._keys: list[PageKey | None] = [None] * num_pages  # the reverse
        self._serials = [0] * num_pages  # of the content, valid where the page has a key
        self._next_serial = 0

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._index)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, namespace: Prefix, token_ids: list[int]) -> Match:
        """The longest cached prefix of at most len(token_ids) - 1 tokens: the last one must be computed, to
        have logits. Takes no reference: the caller does, by `share`, before anything else is allocated."""
        if not self.caching:
            return Match([], namespace, None)
        packed, width = pack(token_ids), 4 * self.page_size
        prefix = namespace
        pages: list[int] = []
        for start in range(0, (len(token_ids) - 1) // self.page_size * width, width):
            key = (prefix, packed[start : start + width])
            page = self._index.get(key)
            if page is None:
                return Match(pages, prefix, key)
            pages.append(page)
            prefix = self._serials[page]
        return Match(pages, prefix, None)

    def num_unused(self, pages: Iterable[int]) -> int:
        """How many of these cached pages count as free until they are shared."""
        return sum(not self._refs[page] for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each of these pages."""
        for page in pages:
            if not self._refs[page]:
                del self._cached[page]
            self._refs[page] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each, blank ones first. The caller has looked at `num_free`."""
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def free(self, pages: list[int]) -> None:
        """One reference less to each. The last page first, so that a prefix outlives its tail."""
        for page in reversed(pages):
            self._refs[page] -= 1
            if not self._refs[page]:
                if self._keys[page] is None:
                    self._blank.append(page)
                else:
                    self._cached[page] = None

    def register(self, page: int, key: PageKey) -> Prefix:
        """Make a full, computed page findable; returns the prefix for the page after it. Content that another
        page holds already stays with that one: pages of a sequence are never exchanged."""
        known = self._index.setdefault(key, page)
        if known == page:
            self._keys[page] = key
            self._serials[page] = self._next_serial
            self._next_serial += 1
        return self._serials[known]

    def forget(self, pages: Iterable[int]) -> None:
        """Nobody is to find these referenced pages any more, e.g. because their content is broken."""
        for page in pages:
            if self._keys[page] is not None:
                self._forget(page)

    def reset_cache(self) -> None:
        """Forget every cached page that nobody references."""
        for page in self._cached:
            self._forget(page)
        self._blank.extend(self._cached)
        self._cached.clear()

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        del self._index[key]
        self._keys[page] = None

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. O(pages): for tests and idle moments."""
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a page is blank twice"
        assert not blank & cached, "a page is blank and cached"
        for page, (refs, key) in enumerate(zip(self._refs, self._keys, strict=True)):
            assert refs >= 0, f"page {page} has {refs} references"
            assert (refs == 0) == (page in blank or page in cached), f"page {page}: {refs} references, yet free"
            assert page not in blank or key is None, f"blank page {page} is findable"
            assert page not in cached or key is not None, f"cached page {page} cannot be found"
            assert key is None or self._index.get(key) == page, f"page {page} is not under its key"
        assert len(self._index) == sum(key is not None for key in self._keys), "the index holds a stale page"
