"""Checks the messages of a chat and brings them into the form templates read. Knows OpenAI's form, not Jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.errors import RequestError

__all__ = ["ROLES", "checked_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles a message may have. A closed list: templates write the role between the marks of a special token."""


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of `messages` whose `content` is a string.

    Text parts are joined with a line feed; no content at all becomes the empty string; other fields are passed on.

    Raises:
        RequestError: no message, a role that is not in `ROLES`, or content that is not text; names the field.
    """
    if not messages:
        raise RequestError("`messages` is empty: send at least one message", param="messages")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"`{field}` is not an object", param=field)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"`{field}.role` is {role!r}; it is one of {', '.join(ROLES)}", param=f"{field}.role")
    return {**message, "content": _text(message.get("content"), f"{field}.content")}


def _text(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"`{field}` is neither a string nor a list of parts", param=field)
    return "\n".join(_part(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(
            f"`{field}.type` is {kind!r}; this server reads parts of type 'text' alone", param=f"{field}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"`{field}.text` is not a string", param=f"{field}.text")
    return text
