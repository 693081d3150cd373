"""Filters and tests of templates: as transformers has them, with their cost checked.

Those that look at single characters (escape, urlencode, dictsort) get the user's real ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from markupsafe import Markup

from templates import limits
from templates.render_state import through_veil, veil
from templates.rendered import TemplateError

# Filters whose argument stays what it is: the others turn it into text or copy its items, so its size is checked.
_CHEAP_FILTERS = frozenset(
    "abs attr batch count d default first float int items last length list map random reject rejectattr reverse round "
    "select selectattr slice".split()
)
# Nothing in a chat needs them, and their cost is hard to bound.
_REMOVED_FILTERS = ("urlize", "wordwrap", "xmlattr")


def _bounded(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its arguments checked and its result accounted for."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = limits.budget()
        budget.tick()
        values = [arg for arg in args if not isinstance(arg, Context | nodes.EvalContext | jinja2.Environment)]
        if name not in _CHEAP_FILTERS:
            budget.check(sum(0 if isinstance(value, str) else limits.text_size(value) for value in values))
        if check := _FILTER_CHECKS.get(name):
            check(values, kwargs)
        return limits.made(plain(*args, **kwargs))

    bounded.__dict__.update(
        getattr(plain, "__dict__", {})
    )  # the marks that say whether it takes the context as first argument
    return bounded


def _walking(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A test whose operands may be compared item by item."""

    def walking(*args: Any, **kwargs: Any) -> Any:
        for arg in args[1:]:
            limits.walkable(arg)
        if len(args) > 1:
            limits.walkable(args[0])
        return plain(*args, **kwargs)

    walking.__dict__.update(getattr(plain, "__dict__", {}))
    return walking


def _check_widths(values: list[Any], kwargs: dict[str, Any]) -> None:
    limits.check_padding(*values[1:], *kwargs.values())
    if values and isinstance(values[0], str):  # indent(width) repeats it on every line
        widest = max((value for value in [*values[1:], *kwargs.values()] if isinstance(value, int)), default=4)
        texts = [len(value) for value in [*values[1:], *kwargs.values()] if isinstance(value, str)]
        limits.budget().check((values[0].count("\n") + 1) * max([widest, *texts]) + len(values[0]))


def _check_filter_replace(values: list[Any], kwargs: dict[str, Any]) -> None:
    if len(values) > 2:
        limits.check_replace(str(values[0]), values[1], values[2])


def _check_filter_join(values: list[Any], kwargs: dict[str, Any]) -> None:
    separator = str(values[1] if len(values) > 1 else kwargs.get("d", ""))
    if values and hasattr(values[0], "__len__"):
        limits.budget().check(len(separator) * len(values[0]))


def _check_sum(values: list[Any], kwargs: dict[str, Any]) -> None:
    if not isinstance(kwargs.get("start", values[2] if len(values) > 2 else 0), int | float):
        raise TemplateError("sum() in the chat template adds numbers only")


_FILTER_CHECKS: dict[str, Callable[[list[Any], dict[str, Any]], None]] = {
    **dict.fromkeys(("center", "indent", "batch", "slice", "round", "truncate", "tojson"), _check_widths),
    "format": lambda values, kwargs: limits.check_percent_format(str(values[0]), [values[1:], kwargs]),
    "replace": _check_filter_replace,
    "join": _check_filter_join,
    "sum": _check_sum,
}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return through_veil(text, _ascii_json) if ensure_ascii else text


def _ascii_json(text: str) -> str:
    return re.sub("[^\x00-\x7f]+", lambda match: json.dumps(match[0])[1:-1], text)


def _characterwise(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A filter that looks at single characters: it gets the real ones."""

    def characterwise(value: Any) -> Any:
        return through_veil(value, plain) if isinstance(value, str) and not isinstance(value, Markup) else plain(value)

    return characterwise


def _dictsort(value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> list[Any]:
    """Items in the order of their real characters."""
    if by not in ("key", "value"):
        raise jinja2.exceptions.FilterArgumentError('dictsort is by "key" or by "value"')

    def rank(item: tuple[Any, Any]) -> Any:
        chosen = item[by == "value"]
        if not isinstance(chosen, str):
            return chosen
        current = veil()
        shown = chosen if current is None else current.seen(chosen, "")
        return shown if case_sensitive else shown.lower()

    return sorted(value.items(), key=rank, reverse=reverse)


def install(environment: jinja2.Environment) -> None:
    """Puts these filters and tests into an environment."""
    filters: dict[str, Any] = environment.filters
    tests: dict[str, Any] = environment.tests
    for name in _REMOVED_FILTERS:
        del filters[name]
    for name in ("e", "escape", "forceescape", "urlencode"):
        filters[name] = _characterwise(filters[name])
    filters |= {"tojson": _tojson, "dictsort": _dictsort}
    environment.filters = {name: _bounded(name, plain) for name, plain in filters.items()}
    environment.tests = {name: _walking(plain) for name, plain in tests.items()}
