"""tools / functions / tool_choice / function_call -> one normal form: a tuple of Tool and a ToolChoice.

Whether a schema can be constrained is decided by the grammar check, whether a model can call tools by its template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from worker.protocol.validation import fail, kind, quote

MAX_TOOLS = 512
# OpenAI's names are [a-zA-Z0-9_-]{1,64}; other servers' tools also use dots, colons and letters of any script.
_NAME = re.compile(r"[\w.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None
    parameters: dict[str, Any] | None  # a JSON schema; None = not given, any object
    strict: bool
    param: str  # where it stood in the request, for errors: "tools[0].function"
    source: dict[str, Any]  # {"type": "function", "function": {...}} as the template gets it


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`named` must call `name`; `required` must call one of `allowed` (None = any tool); `auto` may."""

    kind: Literal["none", "auto", "required", "named"]
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    @property
    def forces(self) -> bool:
        """Whether the answer must be a call."""
        return self.kind in ("required", "named")


def normal_tools(value: Any) -> tuple[Tool, ...]:
    """The `tools` array."""
    return _tools(value, "tools", wrapped=True)


def normal_functions(value: Any) -> tuple[Tool, ...]:
    """The legacy `functions` array."""
    return _tools(value, "functions", wrapped=False)


def _tools(value: Any, param: str, *, wrapped: bool) -> tuple[Tool, ...]:
    if not isinstance(value, list):
        fail(param, f"must be an array, got {kind(value)}", "invalid_type")
    if not value:
        fail(param, "must not be an empty array", "empty_array")
    if len(value) > MAX_TOOLS:
        fail(param, f"must have at most {MAX_TOOLS} entries, got {len(value)}", "array_above_max_length")
    tools: dict[str, Tool] = {}
    for index, item in enumerate(value):
        path = f"{param}[{index}]"
        if not isinstance(item, dict):
            fail(path, f"must be an object, got {kind(item)}", "invalid_type")
        if wrapped:
            if item.get("type", "function") != "function":
                fail(f"{path}.type", f'must be "function", got {quote(item["type"])}', "unsupported_value")
            path = f"{path}.function"
            item = item.get("function")
        tool = _tool(item, path)
        if tool.name in tools:
            fail(f"{path}.name", f"{quote(tool.name)} is given twice")
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(function: Any, path: str) -> Tool:
    if not isinstance(function, dict):
        problem = "is required" if function is None else f"must be an object, got {kind(function)}"
        fail(path, problem, "missing_required_parameter" if function is None else "invalid_type")
    function = {key: value for key, value in function.items() if value is not None}
    for key, expected in (("description", str), ("parameters", dict), ("strict", bool)):
        if key in function and not isinstance(function[key], expected):
            wanted = {str: "a string", dict: "a JSON schema (an object)", bool: "a boolean"}[expected]
            fail(f"{path}.{key}", f"must be {wanted}, got {kind(function[key])}", "invalid_type")
    return Tool(
        name=_name(function.get("name"), f"{path}.name"),
        description=function.get("description"),
        parameters=function.get("parameters"),
        strict=function.get("strict", False),
        param=path,
        source={"type": "function", "function": function},
    )


def _name(value: Any, path: str) -> str:
    if value is None:
        fail(path, "is required", "missing_required_parameter")
    if not isinstance(value, str):
        fail(path, f"must be a string, got {kind(value)}", "invalid_type")
    if not _NAME.fullmatch(value):
        fail(path, f"must be 1 to 128 letters, digits, '_', '-', '.' or ':', got {quote(value)}")
    return value


def normal_choice(value: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """`tool_choice`: a word, {"type": "function", "function": {"name"}} or {"type": "allowed_tools", ...}."""
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(value, str):
        return _word(value, "tool_choice", ("none", "auto", "required"), tools)
    if not isinstance(value, dict):
        fail("tool_choice", f"must be a string or an object, got {kind(value)}", "invalid_type")
    if value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools"), tools)
    if value.get("type", "function") != "function":
        fail("tool_choice.type", f'must be "function" or "allowed_tools", got {quote(value["type"])}')
    function = value.get("function")
    if not isinstance(function, dict):
        fail("tool_choice.function", "must be an object with a name", "missing_required_parameter")
    return ToolChoice("named", name=_known(function.get("name"), "tool_choice.function.name", tools))


def normal_function_call(value: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """The legacy `function_call`: "none", "auto" or {"name": ...}."""
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(value, str):
        return _word(value, "function_call", ("none", "auto"), tools)
    if not isinstance(value, dict):
        fail("function_call", f"must be a string or an object, got {kind(value)}", "invalid_type")
    return ToolChoice("named", name=_known(value.get("name"), "function_call.name", tools))


def _word(value: str, param: str, words: tuple[str, ...], tools: tuple[Tool, ...]) -> ToolChoice:
    if value not in words:
        fail(param, f"must be one of {', '.join(words)} or an object, got {quote(value)}")
    if value == "none" or (value == "auto" and not tools):
        return ToolChoice("none")
    if not tools:
        fail(param, f'"{value}" needs tools')
    return ToolChoice("required" if value == "required" else "auto")


def _known(name: Any, path: str, tools: tuple[Tool, ...]) -> str:
    name = _name(name, path)
    if name not in {tool.name for tool in tools}:
        fail(path, f"{quote(name)} is not among the tools of this request")
    return str(name)


def _allowed(value: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    path = "tool_choice.allowed_tools"
    if not isinstance(value, dict):
        fail(path, f"must be an object with mode and tools, got {kind(value)}", "invalid_type")
    mode, entries = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        fail(f"{path}.mode", f"must be one of auto, required, got {quote(mode)}")
    if not isinstance(entries, list) or not entries:
        fail(f"{path}.tools", "must be a non-empty array", "invalid_type")
    names = []
    for index, entry in enumerate(entries):
        function = entry.get("function") if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            fail(f"{path}.tools[{index}].function", "must be an object with a name", "missing_required_parameter")
        names.append(_known(function.get("name"), f"{path}.tools[{index}].function.name", tools))
    return ToolChoice("required" if mode == "required" else "auto", allowed=tuple(dict.fromkeys(names)))
