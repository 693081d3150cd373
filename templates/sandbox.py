"""The sandbox that templates run in: every step of the language that makes values or takes time is checked.

What the checks are is in `templates.limits`; this says where they stand: in the code that Jinja generates (loops, `~`,
slices, comparisons), at operators, and at method calls. Beyond Jinja's own sandbox, methods are a list of allowed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup, escape

from templates import limits
from templates.render_state import through_veil, veil

REFERENCE_BYTES = 16  # what a loop's body keeps in a buffer for one `{{ }}` or one stretch of text


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


class Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(limits.join)
    made = staticmethod(limits.made)
    walkable = staticmethod(limits.walkable)
    ticking = staticmethod(limits.Ticking)

    @staticmethod
    def occurs(phrase: Any, container: Any) -> bool:
        if isinstance(phrase, str) and isinstance(container, str) and (seen := veil()):
            container = seen.seen(container, phrase)
        return phrase in limits.walkable(container)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, limits.walkable(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, Markup) != isinstance(right, Markup):  # the plain side is escaped
            left, right = (
                through_veil(side, escape) if isinstance(side, str) and not isinstance(side, Markup) else side
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
        if isinstance(owner, str) and __obj.__name__ in ("startswith", "endswith") and (seen := veil()):
            return getattr(seen.seen(owner, str(args[0]) if args else ""), __obj.__name__)(*args)
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
