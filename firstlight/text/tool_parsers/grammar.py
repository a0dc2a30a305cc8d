"""Grammars of answers that are calls: the model's own format, with arguments that fit their schemas. Knows Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.text.tool_parsers.formats import ToolFormat

__all__ = ["Tool", "call_grammar", "reasoning_preamble", "tool_schema"]

MAX_CALLS = 16
"""Calls in one constrained answer: a model that may always add one more may never end."""
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that may be called. `parameters` None takes no arguments; `is_strict` holds it to them always."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    is_strict: bool = False


def tool_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments: always an object."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    is_required: bool,
    is_parallel: bool,
    special_id: Callable[[str], int | None],
    embed: Callable[[Any], Any],
) -> str:
    """A Lark grammar.

    Args:
        is_required: the answer is nothing but calls; else text with calls in it, and the schemas of strict tools hold.
        is_parallel: up to MAX_CALLS calls, else one.
        special_id: the id of a mark that is a special token, or None.
        embed: makes a schema ready to stand inside a grammar.
    """
    mark = _Marks(special_id)
    most = MAX_CALLS if is_parallel else 1
    rules = ["%llguidance {}", f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"]
    for at, tool in enumerate(tools):
        schema = tool_schema(tool) if is_required or tool.is_strict else _ANY_OBJECT
        head = f'{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
        rules.append(f'call_{at}: {_quoted(head)} arguments_{at} "}}"')
        rules.append(f"arguments_{at}: %json {json.dumps(embed(schema))}")
    if form.repeats_marks:
        group = f"{_quoted(form.before)} call {_quoted(form.after)} {mark(form.end)}"
        more = f'("\\n" {mark(form.begin)} {group})'
    else:
        others = f"({_quoted(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
        group = f"{_quoted(form.before)} call {others} {_quoted(form.after)} {mark(form.end)}"
        more = ""
    rules.append(f"group: {group}")
    begin = "" if form.is_bare else mark(form.begin)
    if is_required:
        again = f" {more}{{0,{most - 1}}}" if more and most > 1 else ""
        rules.append(f"start: {begin} group{again}")
    elif form.is_bare:
        rules += ["start: group | FREE", r"FREE: /([^{\s](.|\n)*)?/"]
    else:
        rules += [f"start: (opened group){{0,{most}}} FREE" if is_parallel else "start: FREE | opened group"]
        rules += [r"FREE: /(.|\n)*/"]
        rules += mark.opened(form.begin)
    return "\n".join(rules) + "\n"


def reasoning_preamble(begin: str, end: str, *, is_thinking: bool, special_id: Callable[[str], int | None]) -> str:
    """A Lark grammar of free reasoning, then `@body`: the reasoning must end where the prompt began it
    (`is_thinking`), else it may be left out.
    """
    mark = _Marks(special_id)
    rules = [r"GAP: /\s{1,4}/", r"FREE: /(.|\n)*/", *mark.opened(end)]
    if is_thinking:
        return "\n".join(["start: opened GAP? @body", *rules]) + "\n"
    return "\n".join([f"start: (GAP? {mark(begin)} opened GAP?)? @body", *rules]) + "\n"


class _Marks:
    """A mark as a terminal: a special token by its id, any other as text."""

    def __init__(self, special_id: Callable[[str], int | None]) -> None:
        self._special_id = special_id

    def __call__(self, mark: str) -> str:
        token_id = self._special_id(mark) if mark else None
        return _quoted(mark) if token_id is None else f"<[{token_id}]>"

    def opened(self, mark: str) -> list[str]:
        """Rules of free text up to and with a mark."""
        if self._special_id(mark) is not None:
            return [f"opened: FREE {self(mark)}"]
        escaped = "".join("\\" + c if c in r"\/.[](){}|*+?^$" else c for c in mark)
        return [rf"opened[lazy]: /(.|\n)*{escaped}/"]


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
