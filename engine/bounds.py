"""How large a pattern or grammar is once its repetitions are written out: known without compiling it.

The grammar engine compiles `(?:a{1000}){1000}` in a millisecond and then spends seconds on every token, so sources
are measured first. The sizes are upper bounds: characters and classes, times the repetitions around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

MAX_SIZE = 10_000
MAX_NESTING = 64  # of terminals within terminals


class GrammarError(ValueError):
    """The constraint cannot be compiled. `where` is a path inside the source ("/properties/a"), "" = the whole."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where


# A token of a pattern: its kind is the group's name. Classes may hold classes and escapes.
_PATTERN = re.compile(
    r"""(?P<atom>\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])
      |(?P<open>\((?:\?(?:P?<\w*>|[a-zA-Z-]*:?))?)|(?P<close>\))
      |\{(?P<low>\d+)(?P<comma>,)?(?P<high>\d*)\}|(?P<quantifier>[*+?])
      |(?P<bar>\|)|(?P<char>.)""",
    re.VERBOSE | re.DOTALL,
)
# A token of a lark grammar's right side.
_LARK = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*"i?)|/(?P<regex>(?:\\.|[^/\\\n])+)/[imslux]*
      |(?P<name>[A-Za-z_]\w*)|(?P<open>[(\[])|(?P<close>[)\]])
      |\{(?P<low>\d+)(?P<comma>,)?(?P<high>\d*)\}|~(?P<from>\d+)(?:\.\.(?P<to>\d+))?
      |(?P<quantifier>[*+?])|(?P<bar>\|)|(?P<char>\S)""",
    re.VERBOSE,
)
_DEFINITION = re.compile(r"^[?!]*([A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?(?:\{[^}\n]*\})?\s*:", re.MULTILINE)
_MAX_REPEAT = 10**9


def check_pattern(pattern: str) -> None:
    """Raises GrammarError. Whether the pattern is a valid one is the compiler's business."""
    pattern_size(pattern)


def pattern_size(pattern: str) -> int:
    """Characters with all repetitions written out; `*` and `+` count once. Raises GrammarError beyond MAX_SIZE."""
    return _size(_PATTERN.finditer(pattern), lambda token: 1)


def check_lark(grammar: str) -> None:
    """Raises GrammarError. Terminals are written out wherever they are used; rules are not."""
    starts = list(_DEFINITION.finditer(grammar))
    ends = [match.start() for match in starts[1:]] + [len(grammar)]
    bodies = {match[1]: grammar[match.end() : end] for match, end in zip(starts, ends, strict=True)}
    sizes: dict[str, int] = {}
    nesting: list[str] = []

    def item(token: re.Match[str]) -> int:
        if regex := token["regex"]:
            return _size(_PATTERN.finditer(regex), lambda token: 1)
        if string := token["string"]:
            return len(string)
        name = token["name"]
        return terminal(name) if name in bodies and name.lstrip("_").isupper() else 1

    def terminal(name: str) -> int:
        if name not in sizes:
            if len(nesting) >= MAX_NESTING:
                raise GrammarError(f"nests terminals more than {MAX_NESTING} deep")
            nesting.append(name)
            sizes[name] = 1  # a terminal that contains itself is refused by the compiler
            sizes[name] = _size(_LARK.finditer(bodies[name]), item)
            nesting.pop()
        return sizes[name]

    for name, body in bodies.items():
        if name not in sizes:
            _size(_LARK.finditer(body), item)


def _size(tokens: Iterator[re.Match[str]], item: Callable[[re.Match[str]], int]) -> int:
    sums = [0]  # of the open groups
    last = 0  # size of the item that a quantifier would repeat
    quantified = lazy = False
    for token in tokens:
        repeat = _repeat(token)
        if repeat is not None:
            if quantified and token["quantifier"] == "?" and not lazy:
                lazy = True  # `a+?`: as few as possible
                continue
            if quantified:
                raise GrammarError(f"repeats a repetition (at {token[0][:20]!r})")
            sums[-1] += last * (repeat - 1)
            quantified = True
        else:
            quantified = lazy = False
            if token["open"]:
                sums.append(0)
                last = 0
            elif token["close"]:
                last = sums.pop() if len(sums) > 1 else 0
                sums[-1] += last
            elif token["char"] == "\\":
                raise GrammarError("ends with a lone backslash")
            else:
                last = 0 if token["bar"] else item(token)
                sums[-1] += last
        if sums[-1] > MAX_SIZE:
            raise GrammarError(f"is too large: more than {MAX_SIZE} characters with its repetitions written out")
    return sum(sums)


def _repeat(token: re.Match[str]) -> int | None:
    """How often a quantifier repeats what is before it, at least 1; None if the token is no quantifier."""
    if token["quantifier"]:
        return 1
    groups = token.groupdict()
    counts = [groups[name] for name in ("low", "high", "from", "to") if groups.get(name)]
    if not counts:
        return None
    return max(1, *(int(count) if len(count) < 10 else _MAX_REPEAT for count in counts))
