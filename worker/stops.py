"""Stop strings, found in a text that arrives in pieces.

One automaton a stop string (Knuth-Morris-Pratt): every character is looked at once, whatever the strings' lengths, and
the states say exactly how much of the text's end may still become a stop string. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """`scan(text)` goes on where the last call ended. The first stop string to be complete wins; of several that are
    complete at the same character, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that end the text seen so far

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still belong to a stop string."""
        return max(self._matched, default=0)

    def scan(self, text: str, *, active: bool = True) -> tuple[str, int] | None:
        """Looks at `text`. Returns the stop string found and the index in `text` behind its last character; with
        `active` false a string that becomes complete does not count (but its end may begin another)."""
        for index, char in enumerate(text):
            found = self._advance(char)
            if found is not None and active:
                return found, index + 1
        return None

    def _advance(self, char: str) -> str | None:
        found = None
        for number, stop in enumerate(self._stops):
            fallbacks = self._fallbacks[number]
            matched = self._matched[number]
            while matched and stop[matched] != char:
                matched = fallbacks[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = fallbacks[-1]
            self._matched[number] = matched
        return found


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper suffix that is again a prefix."""
    fallbacks = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = fallbacks[length - 1]
        if stop[index] == stop[length]:
            length += 1
        fallbacks[index] = length
    return fallbacks
