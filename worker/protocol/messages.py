"""`messages` in every shape that clients send -> one normal form, a list of plain dicts.

Normal form: `role` is one of system, developer, user, assistant, tool; `content` is a string, a list of
{"type": "text", "text": ...} parts or (assistant only) None; keys whose value is null are gone, so is an empty
`tool_calls`; a legacy `function_call` is a tool call and a `function` message the tool result that answers it.
Keys that are not known here (`reasoning_content`, `name`, a template's own) pass through untouched.

Every error names the message and the field: messages[3].content[0].text.
"""

from __future__ import annotations

from typing import Any

from worker.protocol.validation import fail, kind, quote

MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# What an assistant turn may hold instead of content.
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "reasoning", "reasoning_content")
_MEDIA_PARTS = {
    "image_url": "image", "image": "image", "input_image": "image", "image_pil": "image", "image_embeds": "image",
    "input_audio": "audio", "audio_url": "audio", "audio": "audio",
    "video_url": "video", "video": "video", "input_video": "video",
    "file": "file", "input_file": "file", "file_url": "file",
}  # fmt: skip


def normal_messages(value: Any) -> list[dict[str, Any]]:
    """Validate and normalise. One string is one user message. That there are at most MAX_MESSAGES is checked before."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}] if value else []
    if not isinstance(value, list):
        fail("messages", f"must be an array of messages, got {kind(value)}", "invalid_type")
    if not value:
        fail("messages", "must not be empty", "empty_array")
    messages: list[dict[str, Any]] = []
    pending: dict[str, str] = {}  # legacy function name -> the id given to its latest call
    for index, item in enumerate(value):
        messages.append(_message(item, f"messages[{index}]", pending, index))
    return messages


def _message(item: Any, path: str, pending: dict[str, str], index: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        fail(path, f"must be an object with role and content, got {kind(item)}", "invalid_type")
    message = {key: value for key, value in item.items() if value is not None}
    role = message.get("role")
    if role is None:
        fail(f"{path}.role", "is required", "missing_required_parameter")
    if role not in ROLES:
        fail(f"{path}.role", f"must be one of {', '.join(ROLES)}, got {quote(role)}")
    for key in ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content"):
        if key in message and not isinstance(message[key], str):
            fail(f"{path}.{key}", f"must be a string, got {kind(message[key])}", "invalid_type")
    if "audio" in message:
        fail(f"{path}.audio", "is not supported: this server takes text only", "unsupported_parameter")
    if role == "assistant":
        _assistant(item, message, path, pending, index)
    else:
        _forbid_calls(message, path)
        message["content"] = _content(message.get("content"), path, role)
    if role == "function":
        _as_tool_result(message, path, pending)
    return message


def _assistant(item: dict[str, Any], message: dict[str, Any], path: str, pending: dict[str, str], index: int) -> None:
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if "content" not in item and not any(message.get(key) for key in _INSTEAD_OF_CONTENT):
        fail(
            f"{path}.content", "is required where an assistant message has no tool_calls", "missing_required_parameter"
        )
    content = message.get("content")
    message["content"] = None if content is None else _content(content, path, "assistant")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    elif "function_call" in message:
        function = _function(message.pop("function_call"), f"{path}.function_call")
        pending[function["name"]] = call_id = f"call_{index}"
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    message.pop("function_call", None)


def _forbid_calls(message: dict[str, Any], path: str) -> None:
    for key in ("tool_calls", "function_call"):
        if message.pop(key, None):
            fail(f"{path}.{key}", "belongs to assistant messages only")


def _content(content: Any, path: str, role: str) -> str | list[dict[str, Any]]:
    path = f"{path}.content"
    if content is None:
        if role == "function":  # the legacy schema allows a function that returned nothing
            return ""
        fail(path, "is required", "missing_required_parameter")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fail(path, f"must be a string or an array of parts, got {kind(content)}", "invalid_type")
    return [_part(part, f"{path}[{index}]", role) for index, part in enumerate(content)]


def _part(part: Any, path: str, role: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        fail(path, f"must be an object with a type or a string, got {kind(part)}", "invalid_type")
    part_type = part.get("type")
    if part_type is None:
        fail(f"{path}.type", "is required", "missing_required_parameter")
    if isinstance(part_type, str) and part_type in _MEDIA_PARTS:
        fail(path, f"is a part of type {part_type}: this server takes no {_MEDIA_PARTS[part_type]} input",
             "unsupported_value")  # fmt: skip
    key = "refusal" if part_type == "refusal" and role == "assistant" else "text"
    if part_type not in ("text", "input_text", "output_text", "refusal") or (part_type == "refusal" and key == "text"):
        fail(f"{path}.type", f'must be "text", got {quote(part_type)}')
    text = part.get(key)
    if not isinstance(text, str):
        problem = "is required" if text is None else f"must be a string, got {kind(text)}"
        fail(f"{path}.{key}", problem, "missing_required_parameter" if text is None else "invalid_type")
    return {"type": "text", "text": text}


def _tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        fail(path, f"must be an array, got {kind(value)}", "invalid_type")
    calls = []
    for index, call in enumerate(value):
        here = f"{path}[{index}]"
        if not isinstance(call, dict):
            fail(here, f"must be an object, got {kind(call)}", "invalid_type")
        if call.get("type") not in (None, "function"):
            fail(f"{here}.type", f'must be "function", got {quote(call["type"])}')
        call_id = call.get("id")
        if call_id is not None and not isinstance(call_id, str):
            fail(f"{here}.id", f"must be a string, got {kind(call_id)}", "invalid_type")
        normal: dict[str, Any] = {"id": call_id} if call_id is not None else {}
        calls.append(normal | {"type": "function", "function": _function(call.get("function"), f"{here}.function")})
    return calls


def _function(value: Any, path: str) -> dict[str, Any]:
    """{"name": str, "arguments": str | dict}; arguments that are absent are "{}"."""
    if not isinstance(value, dict):
        problem = "is required" if value is None else f"must be an object, got {kind(value)}"
        fail(path, problem, "missing_required_parameter" if value is None else "invalid_type")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        fail(f"{path}.name", "must be a non-empty string", "missing_required_parameter")
    if arguments is None:
        arguments = "{}"
    if not isinstance(arguments, str | dict):
        fail(f"{path}.arguments", f"must be a string of JSON, got {kind(arguments)}", "invalid_type")
    return {"name": name, "arguments": arguments}


def _as_tool_result(message: dict[str, Any], path: str, pending: dict[str, str]) -> None:
    name = message.get("name")
    if not name:
        fail(f"{path}.name", "is required in a function message", "missing_required_parameter")
    message["role"] = "tool"
    if name in pending:
        message["tool_call_id"] = pending[name]
