"""How the served model writes calls and reasoning, and what a request's answer is read with. Knows one model.

Between the checked request and the engine: the prompt's messages, the grammar of required calls, the parser of the
answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from firstlight.config import ServerConfig
from firstlight.engine.frontend import AsyncEngine
from firstlight.errors import RequestError
from firstlight.server.tools import ToolUse
from firstlight.text.grammar import embedded_schema
from firstlight.text.tool_parsers import (
    TOOL_FORMATS,
    AnswerParser,
    call_grammar,
    format_of,
    reasoning_preamble,
    tool_messages,
    tool_schema,
)
from firstlight.types import GrammarSpec, SamplingParams

__all__ = ["Dialect"]

_THINK_MARKS = ("<think>", "</think>")
_PROMPT_END_TOKENS = 8
"""Enough ids to see whether a prompt ends with `<think>`."""


class Dialect:
    """One model's ways. Immutable."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        template = engine.chat_template
        source = template.source if template is not None else ""
        self._engine = engine
        self._form = format_of(source) if config.tool_parser == "auto" else TOOL_FORMATS[config.tool_parser]
        self._takes_tools = template is not None and "tools" in template.variables
        self._reasons = config.reasoning_parser == "think" or (
            config.reasoning_parser == "auto" and _THINK_MARKS[0] in source
        )

    def prompt(
        self, messages: list[dict[str, Any]], use: ToolUse | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """(messages, tools) as the chat template takes them."""
        raw = use.raw if use is not None else []
        if self._takes_tools:
            return [self._with_own_ids(message) for message in messages], raw or None
        return tool_messages(messages, raw, self._form), None

    async def constrained(
        self, params: SamplingParams, use: ToolUse | None, prompt_ids: Sequence[int]
    ) -> SamplingParams:
        """The parameters, with the grammar that the answer has to keep to: of calls where the request needs one
        (required calls, strict functions in free answers, one call at most), behind the model's reasoning.

        Raises:
            RequestError: a function's schema cannot be used, or the request asks for another grammar besides.
        """
        params = await self._with_calls(params, use)
        if params.grammar is None or not self._reasons:
            return params
        preamble = reasoning_preamble(*_THINK_MARKS, is_thinking=self._thinks(prompt_ids), special_id=self._special_id)
        return _with_grammar(params, msgspec.structs.replace(params.grammar, preamble=preamble))

    async def _with_calls(self, params: SamplingParams, use: ToolUse | None) -> SamplingParams:
        if use is None:
            return params
        if not (use.is_required or not use.is_parallel or any(tool.is_strict for _, tool in use.callable)):
            return params
        if params.grammar is not None:
            raise RequestError(
                f"`{params.grammar.field}` cannot be combined with tools that must be called, are strict, or are "
                "called one at a time",
                param=params.grammar.field,
            )
        for at, tool in use.callable:  # first each for itself: an error then names the function
            if use.is_required or tool.is_strict:
                field = f"tools[{at}].function.parameters"
                spec = GrammarSpec(kind="json_schema", text=json.dumps(tool_schema(tool)), field=field)
                await self._engine.prepare(_with_grammar(params, spec))
        text = await asyncio.to_thread(self._call_grammar, use)  # schemas may be large
        return _with_grammar(params, GrammarSpec(kind="grammar", text=text, field="tools"))

    def _call_grammar(self, use: ToolUse) -> str:
        return call_grammar(
            self._form,
            [tool for _, tool in use.callable],
            is_required=use.is_required,
            is_parallel=use.is_parallel,
            special_id=self._special_id,
            embed=lambda schema: embedded_schema(json.dumps(schema), "tools"),
        )

    def marks(self, use: ToolUse | None) -> tuple[str, ...]:
        """Special tokens that the parser has to see."""
        return (self._form.marks if use is not None else ()) + (_THINK_MARKS if self._reasons else ())

    def parser(self, use: ToolUse | None, prompt_ids: Sequence[int]) -> AnswerParser | None:
        """What takes an answer apart; None where the answer is nothing but text."""
        if use is None and not self._reasons:
            return None
        form = self._form if use is not None else None
        return AnswerParser(
            form, self._call_id, has_reasoning=self._reasons, is_thinking=self._reasons and self._thinks(prompt_ids)
        )

    def _call_id(self) -> str:
        drawn = uuid.uuid4().hex
        return drawn[: self._form.id_chars] if self._form.id_chars else f"call_{drawn[:24]}"

    def _with_own_ids(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with ids of the length that the model's template insists on; equal ids stay equal."""
        if not self._form.id_chars:
            return message
        changed = dict(message)
        if "tool_call_id" in message:
            changed["tool_call_id"] = self._own_id(message["tool_call_id"])
        if "tool_calls" in message:
            changed["tool_calls"] = [{**call, "id": self._own_id(call["id"])} for call in message["tool_calls"]]
        return changed

    def _own_id(self, call_id: str) -> str:
        size = self._form.id_chars
        if len(call_id) == size and call_id.isalnum():
            return call_id
        return hashlib.blake2b(call_id.encode("utf-8", "replace")).hexdigest()[:size]

    def _thinks(self, prompt_ids: Sequence[int]) -> bool:
        end = self._engine.tokenizer.decode(prompt_ids[-_PROMPT_END_TOKENS:], skip_special=False)
        return end.rstrip().endswith(_THINK_MARKS[0])

    def _special_id(self, mark: str) -> int | None:
        tokenizer = self._engine.tokenizer
        token_id = tokenizer.token_to_id(mark)
        return token_id if token_id is not None and tokenizer.is_special(token_id) else None


def _with_grammar(params: SamplingParams, spec: GrammarSpec) -> SamplingParams:
    return msgspec.structs.replace(params, grammar=spec)
