"""Answers taken apart as they come: reasoning, text, tool calls. Knows text and formats, not ids or transport.

A family of models is one `ToolFormat`: its marks, and where name and arguments stand. `TOOL_FORMATS` lists those that
ship; `answer_parser` takes any.
"""

from firstlight.text.tool_parsers.answer import AnswerParser, Part
from firstlight.text.tool_parsers.calls import CallParser
from firstlight.text.tool_parsers.formats import TOOL_FORMATS, ToolFormat, format_of
from firstlight.text.tool_parsers.grammar import Tool, call_grammar, reasoning_preamble, tool_schema
from firstlight.text.tool_parsers.prompt import tool_messages

__all__ = [
    "TOOL_FORMATS",
    "AnswerParser",
    "CallParser",
    "Part",
    "Tool",
    "ToolFormat",
    "call_grammar",
    "format_of",
    "reasoning_preamble",
    "tool_messages",
    "tool_schema",
]
