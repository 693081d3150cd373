"""The template language: Jinja as transformers sets it up, in a sandbox that also bounds time and memory.

Same output as transformers for every template that stays within the limits: trim_blocks, lstrip_blocks, loop
controls, the `generation` tag, `tojson` without HTML escapes, strftime_now, raise_exception. Knows nothing of chats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup, escape

from templates import limits
from templates.rendered import TemplateError


class Veil(Protocol):
    """What stands between a template and some characters of the values (`templates.shield.Shield`)."""

    def through(self, text: str, apply: Callable[[str], str]) -> str:
        """`apply` on the real characters, its result veiled again."""
        ...

    def seen(self, text: str, phrase: str) -> str:
        """`text` as it is compared with a phrase of the template."""
        ...


MAX_SOURCE_CHARS = 1 << 20
REFERENCE_BYTES = 16  # what a loop's body keeps in a buffer for one `{{ }}` or one stretch of text

_now: ContextVar[datetime | None] = ContextVar("template_now", default=None)
_veil: ContextVar[Veil | None] = ContextVar("template_veil", default=None)


def compile_template(source: str) -> jinja2.Template:
    """Raises TemplateError if the source is no valid template."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
    try:
        with limits.limited(limits.Budget()):
            return ENVIRONMENT.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from None
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template is not valid Jinja: {error}") from None
    except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
        if isinstance(error, TemplateError):
            raise
        raise TemplateError("the chat template is nested too deeply or is not valid Jinja") from None


def parse(source: str) -> nodes.Template:
    return ENVIRONMENT.parse(source)


def variables(source: str) -> frozenset[str]:
    """Names that the template reads and does not always set itself."""
    return frozenset(meta.find_undeclared_variables(parse(source)))


def render(template: jinja2.Template, values: Mapping[str, Any], budget: limits.Budget) -> str:
    """The rendered text. Raises TemplateError: with the template's own words where it calls raise_exception."""
    parts: list[str] = []
    try:
        with limits.limited(budget):
            for part in template.root_render_func(template.new_context(dict(values))):
                budget.spend(len(part) + REFERENCE_BYTES)
                parts.append(part)
            budget.check(sum(map(len, parts)))
    except TemplateError:
        raise
    except RecursionError:
        raise TemplateError("the chat template calls itself without end") from None
    except jinja2.TemplateError as error:
        raise TemplateError(str(error.message or "the chat template failed")) from None
    except Exception as error:  # whatever Python raises for what the template did with the values
        raise TemplateError(f"the chat template cannot render these messages: {error}") from None
    return "".join(parts)


@contextmanager
def clock(moment: datetime | None) -> Iterator[None]:
    """strftime_now() in templates rendered inside shows `moment` (None: the time it is)."""
    token = _now.set(moment)
    try:
        yield
    finally:
        _now.reset(token)


@contextmanager
def veiled(veil: Veil | None) -> Iterator[None]:
    """Values rendered inside have stand-ins for some characters, which `veil` knows."""
    token = _veil.set(veil)
    try:
        yield
    finally:
        _veil.reset(token)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks an assistant's turn for training. Only its content counts."""

    tags = {"generation"}  # noqa: RUF012 (the library's own name)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class _Generator(CodeGenerator):
    """Python code of a template, with the checks where the language itself makes values or loops."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        size = REFERENCE_BYTES * sum(len(output.nodes) for output in node.find_all(nodes.Output))
        counted = nodes.Call(
            nodes.EnvironmentAttribute("ticking"), [node.iter, nodes.Const(size)], [], None, None, lineno=node.lineno
        )
        fields = {name: getattr(node, name) for name in node.fields} | {"iter": counted}
        super().visit_For(nodes.For(*fields.values(), lineno=node.lineno), frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """`'<' in text` looks at the real characters of the text; lists are not compared for ever."""
        if isinstance(node.expr, nodes.Const) and [operand.op for operand in node.ops] in (["in"], ["notin"]):
            self.write("(not " if node.ops[0].op == "notin" else "(")
            self.write("environment.occurs(")
            self.visit(node.expr, frame)
            self.write(", ")
            self.visit(node.ops[0].expr, frame)
            self.write("))")
            return
        self.write("(")
        self._visit_walkable(node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._visit_walkable(operand.expr, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._visit_walkable(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _visit_walkable(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.walkable(")
        self.visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.made(")
        super().visit_Getitem(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(limits.join)
    made = staticmethod(limits.made)
    walkable = staticmethod(limits.walkable)
    ticking = staticmethod(limits.Ticking)

    @staticmethod
    def occurs(phrase: Any, container: Any) -> bool:
        if isinstance(phrase, str) and isinstance(container, str) and (veil := _veil.get()):
            container = veil.seen(container, phrase)
        return phrase in limits.walkable(container)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, limits.walkable(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, Markup) != isinstance(right, Markup):  # the plain side is escaped
            left, right = (
                _veiled(side, escape) if isinstance(side, str) and not isinstance(side, Markup) else side
                for side in (left, right)
            )
        return limits.binary(operator, self.binop_table[operator], left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((names for kind, names in _METHODS.items() if isinstance(obj, kind)), None)
        return (allowed is None or attr in allowed) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        plain = super().wrap_str_format(value)
        if plain is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            limits.check_brace_format(value.__self__, [args, kwargs])
            return plain(*args, **kwargs)

        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        limits.budget().tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and __obj.__name__ in ("startswith", "endswith") and (veil := _veil.get()):
            return getattr(veil.seen(owner, str(args[0]) if args else ""), __obj.__name__)(*args)
        if isinstance(owner, list | tuple | Mapping):  # index(), count(), get()
            limits.walkable([owner, *args])
        if isinstance(owner, str) and (check := _STR_CHECKS.get(__obj.__name__)):
            args = check(owner, args, kwargs) or args
        return limits.made(super().call(__context, __obj, *args, **kwargs))


# Methods that templates may call, by the type of their object; of types that are not listed, all that are safe.
_METHODS: dict[type | tuple[type, ...], frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
        "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
        "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
        "startswith strip swapcase title upper zfill striptags unescape".split()
    ),
    (bytes, bytearray): frozenset(),
    (int, float): frozenset({"is_integer", "bit_length"}),
}


def _check_pad(text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    limits.check_padding(*args, *kwargs.values())


def _check_tabs(text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _check_pad(text, args, kwargs)
    limits.budget().check(len(text) + text.count("\t") * limits.MAX_PADDING)


def _check_join(text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (limits.check_join(text, args[0]), *args[1:]) if args else args


def _check_replace(text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 1:
        limits.check_replace(text, args[0], args[1])


_STR_CHECKS: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_pad),
    "expandtabs": _check_tabs,
    "join": _check_join,
    "replace": _check_replace,
}

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


class _Dict:
    """`dict` in templates: a callable only, so that no template reaches the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*map(limits.walkable, args), **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(limits.walkable(list(keys)), value)


class _Namespace(Namespace):
    """`namespace` in templates: attributes that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` may be an attribute
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot set the attribute {name!r}")


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(limits.printable(message)))


def now() -> datetime:
    return _now.get() or datetime.now()


def _strftime_now(pattern: str) -> str:
    return now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _veiled(text, _ascii_json) if ensure_ascii else text


def _ascii_json(text: str) -> str:
    return re.sub("[^\x00-\x7f]+", lambda match: json.dumps(match[0])[1:-1], text)


def _veiled(text: str, apply: Callable[[str], str]) -> str:
    veil = _veil.get()
    return apply(text) if veil is None else veil.through(text, apply)


def _characterwise(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A filter that looks at single characters: it gets the real ones."""

    def characterwise(value: Any) -> Any:
        return _veiled(value, plain) if isinstance(value, str) and not isinstance(value, Markup) else plain(value)

    return characterwise


def _dictsort(value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> list[Any]:
    """Items in the order of their real characters."""
    if by not in ("key", "value"):
        raise jinja2.exceptions.FilterArgumentError('dictsort is by "key" or by "value"')

    def rank(item: tuple[Any, Any]) -> Any:
        chosen = item[by == "value"]
        if not isinstance(chosen, str):
            return chosen
        veil = _veil.get()
        shown = chosen if veil is None else veil.seen(chosen, "")
        return shown if case_sensitive else shown.lower()

    return sorted(value.items(), key=rank, reverse=reverse)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=limits.printable
    )
    for name in _REMOVED_FILTERS:
        del environment.filters[name]
    for name in ("e", "escape", "forceescape", "urlencode"):
        environment.filters[name] = _characterwise(environment.filters[name])
    environment.filters |= {"tojson": _tojson, "dictsort": _dictsort}
    environment.filters = {name: _bounded(name, plain) for name, plain in environment.filters.items()}
    tests: dict[str, Any] = environment.tests
    environment.tests = {name: _walking(plain) for name, plain in tests.items()}
    del environment.globals["lipsum"]
    environment.globals.update(
        range=limits.limited_range,
        dict=_Dict(),
        namespace=_Namespace,
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
    )
    return environment


ENVIRONMENT = _environment()
GLOBAL_NAMES = frozenset(ENVIRONMENT.globals)
