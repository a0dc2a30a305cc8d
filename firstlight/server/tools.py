"""`tools` and `tool_choice` of a chat request, checked; and messages that carry calls and their results.

Knows the wire forms. How a model writes calls is `firstlight.text.tool_parsers`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from firstlight.errors import RequestError, UnsupportedParameter
from firstlight.server.fields import unknown_name
from firstlight.text.tool_parsers import Tool

__all__ = ["ToolUse", "checked_calls", "tool_use"]

_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,64}")
_FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
_CHOICES = ("none", "auto", "required")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about calls. `raw` is as the client wrote it, for the chat template."""

    tools: list[Tool]
    raw: list[dict[str, Any]]
    is_required: bool = False
    is_parallel: bool = True
    only: str | None = None
    """The one function that must be called."""
    num_bytes: int = 0
    """Length of `raw` as JSON."""

    @property
    def callable(self) -> list[tuple[int, Tool]]:
        """The functions that may be called, with their places in the request."""
        return [(at, tool) for at, tool in enumerate(self.tools) if self.only in (None, tool.name)]


def tool_use(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None, max_tools: int) -> ToolUse | None:
    """The checked use of tools; None where none may be called.

    Raises:
        RequestError: names the field.
    """
    if not tools:
        if choice not in (None, "none"):
            raise RequestError("`tool_choice` needs `tools`", param="tool_choice")
        return None
    if len(tools) > max_tools:
        raise RequestError(f"`tools` has {len(tools)} functions, `max_tools` allows {max_tools}", param="tools")
    checked = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
    names = [tool.name for tool in checked]
    twice = next((at for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise RequestError(f"`tools[{twice}].function.name` is {names[twice]!r}, as another's", param="tools")
    if choice == "none":
        return None
    only = _named(choice, names)
    return ToolUse(
        tools=checked,
        raw=tools,
        is_required=choice == "required" or only is not None,
        is_parallel=parallel is not False and only is None,
        only=only,
        num_bytes=len(msgspec.json.encode(tools)),
    )


def _tool(tool: Any, path: str) -> Tool:
    if not isinstance(tool, dict):
        raise RequestError(f"`{path}` must be an object", param=path)
    if tool.get("type") != "function":
        raise UnsupportedParameter(
            f"`{path}.type` is {tool.get('type')!r:.64}: only 'function' is supported", param=f"{path}.type"
        )
    for name in tool.keys() - {"type", "function"}:
        raise unknown_name(name, {"type", "function"}, f"a field of `{path}`", f"{path}.{name:.64}")
    function, where = tool.get("function"), f"{path}.function"
    if not isinstance(function, dict):
        raise RequestError(f"`{where}` is required: an object with `name`", param=where)
    for name in function.keys() - _FUNCTION_FIELDS:
        raise unknown_name(name, _FUNCTION_FIELDS, f"a field of `{where}`", f"{where}.{name:.64}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"`{where}.name` must be 1 to 64 letters, digits, dots, dashes or underscores", param=f"{where}.name"
        )
    for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(function.get(field), (kind, type(None))):
            raise RequestError(f"`{where}.{field}` has the wrong type", param=f"{where}.{field}")
    return Tool(
        name=name,
        description=function.get("description"),
        parameters=function.get("parameters"),
        is_strict=bool(function.get("strict")),
    )


def _named(choice: Any, names: list[str]) -> str | None:
    """The function that `tool_choice` names, if it names one."""
    if choice is None or choice in _CHOICES:
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        kinds = ", ".join(repr(kind) for kind in _CHOICES)
        raise RequestError(
            f'`tool_choice` must be {kinds} or {{"type": "function", "function": {{"name": ...}}}}', param="tool_choice"
        )
    if name not in names:
        raise RequestError(
            f"`tool_choice.function.name` is {name[:64]!r}, which is not in `tools`", param="tool_choice"
        )
    return name


def checked_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """`tool_calls` of an assistant message, arguments as objects, the form that chat templates read.

    Raises:
        RequestError: names the field.
    """
    if not isinstance(calls, list):
        raise RequestError(f"`{path}` must be a list of calls", param=path)
    checked = []
    for at, call in enumerate(calls):
        where = f"{path}[{at}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"`{where}.function.name` is required", param=f"{where}.function.name")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            raise RequestError(
                f"`{where}.function.arguments` is required: JSON as text", param=f"{where}.function.arguments"
            )
        shown: dict[str, Any] = {"name": function["name"], "arguments": _arguments(arguments)}
        checked.append({"type": "function", "id": str(call.get("id") or f"call_{at}"), "function": shown})
    return checked


def _arguments(text: str) -> Any:
    """The arguments as an object; as the text they came as where they are none (a model wrote them)."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text
