"""Tools for models whose chat template knows none: a system block that describes them, calls and results as text.

Knows messages in OpenAI's form; a template that takes `tools` gets them as they are and needs none of this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from firstlight.text.tool_parsers.formats import ToolFormat

__all__ = ["tool_messages"]


def tool_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation with tools described in its system message, past calls and results written as text."""
    shown = [_as_text(message, form) for message in messages]
    if not tools:
        return shown
    block = _block(tools, form)
    if shown and shown[0]["role"] == "system":
        return [{**shown[0], "content": f"{shown[0]['content']}\n\n{block}"}, *shown[1:]]
    return [{"role": "system", "content": block}, *shown]


def _block(tools: Sequence[dict[str, Any]], form: ToolFormat) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.written([f'{{"name": "<function name>", "{form.arguments_key}": {{"<argument>": <value>}}}}'])
    return (
        "You can call functions. Each line between <tools> and </tools> describes one in JSON.\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call one, answer with nothing but this form, filled in:\n{example}\n"
        "If no function helps, answer in words."
    )


def _as_text(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = form.written([_call(call["function"], form) for call in calls])
    content = f"{message['content']}\n{written}" if message.get("content") else written
    return {"role": "assistant", "content": content}


def _call(function: dict[str, Any], form: ToolFormat) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "{form.arguments_key}": {text}}}'
