"""The template language: Jinja as transformers sets it up, in a sandbox that also bounds time and memory.

Same output as transformers for every template that stays within the limits: trim_blocks, lstrip_blocks, loop
controls, the `generation` tag, `tojson` without HTML escapes, strftime_now, raise_exception. Knows nothing of chats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from templates import filters, limits
from templates.render_state import now
from templates.rendered import TemplateError
from templates.sandbox import REFERENCE_BYTES, Sandbox

# Several times the longest template known. Parsing and compiling take the longer the larger a template is.
MAX_SOURCE_CHARS = 100_000
MAX_NODES = 10_000


@dataclass(frozen=True)
class Program:
    """A compiled template, and what it says about itself."""

    template: jinja2.Template
    variables: frozenset[str]  # names that it reads and does not always set itself
    constants: frozenset[str]  # its string constants
    words: frozenset[str]  # those, and every attribute that it reads: what it may compare values and keys with
    asks_for_null: bool  # it has a branch for content that is null


def compile_template(source: str) -> Program:
    """Raises TemplateError if the source is no valid template."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
    try:
        with limits.limited(limits.Budget()):
            return _compile(ENVIRONMENT.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from None
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template is not valid Jinja: {error}") from None
    except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
        if isinstance(error, TemplateError):
            raise
        raise TemplateError("the chat template is nested too deeply or is not valid Jinja") from None


def _compile(tree: nodes.Template) -> Program:
    if sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
        raise TemplateError("the chat template has too many parts")
    constants = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    variables, asks_for_null = frozenset(meta.find_undeclared_variables(tree)), _asks_for_null(tree)
    code = ENVIRONMENT.compile(tree)  # last: it folds constants in the tree
    template = jinja2.Template.from_code(ENVIRONMENT, code, ENVIRONMENT.make_globals(None))
    return Program(template, variables, constants, constants | attributes, asks_for_null)


def _asks_for_null(tree: nodes.Template) -> bool:
    if any(test.name == "none" and _is_content(test.node) for test in tree.find_all(nodes.Test)):
        return True
    for compare in tree.find_all(nodes.Compare):
        operands = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(isinstance(o, nodes.Const) and o.value is None for o in operands) and any(map(_is_content, operands)):
            return True
    return False


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


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


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks an assistant's turn for training. Only its content counts."""

    tags = {"generation"}  # noqa: RUF012 (the library's own name)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


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


def _strftime_now(pattern: str) -> str:
    return now().strftime(pattern)


def _environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=limits.printable
    )
    filters.install(environment)
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
