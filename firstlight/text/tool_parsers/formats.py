"""How families of models write tool calls. Knows the marks, not how they are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TOOL_FORMATS", "ToolFormat", "format_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls: `begin` `before` call `between` call ... `after` `end`.

    A call is a JSON object with `name` and `arguments_key`. With `repeats_marks` every call stands in marks of its own,
    a line break between them. With `is_bare` the answer may begin with a call and no mark; such an answer holds nothing
    but calls. With `has_named_calls` a call may also be written `name{...}` or `name[ARGS]{...}`.
    """

    name: str
    begin: str
    end: str = ""
    before: str = ""
    between: str = ", "
    after: str = ""
    arguments_key: str = "arguments"
    repeats_marks: bool = False
    is_bare: bool = False
    has_named_calls: bool = False
    id_chars: int = 0
    """Length of the ids that the family's templates insist on; 0: any."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a vocabulary, and have to be seen all the same."""
        return tuple(mark for mark in (self.begin, self.end, "[ARGS]" if self.has_named_calls else "") if mark)

    def written(self, calls: list[str]) -> str:
        """The text of calls that are given as JSON objects."""
        begin, end = ("", "") if self.is_bare else (self.begin, self.end)
        if self.repeats_marks:
            return "\n".join(begin + self.before + call + self.after + end for call in calls)
        return begin + self.before + self.between.join(calls) + self.after + end


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    known.name: known
    for known in (
        ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>", before="\n", after="\n", repeats_marks=True),
        ToolFormat(name="smollm2", begin="<tool_call>", end="</tool_call>", before="[", after="]"),
        ToolFormat(name="llama3", begin="<|python_tag|>", between="; ", arguments_key="parameters", is_bare=True),
        ToolFormat(name="mistral", begin="[TOOL_CALLS]", before="[", after="]", has_named_calls=True, id_chars=9),
    )
}


def format_of(template: str | None) -> ToolFormat:
    """The format that a model's chat template shows its model knows; for one that shows none, a plain one.

    Hermes and Qwen write one object per pair of marks; SmolLM2 was trained with a list in one pair.
    """
    source = template or ""
    if "[TOOL_CALLS]" in source:
        return TOOL_FORMATS["mistral"]
    if "<tool_call>" in source:
        return TOOL_FORMATS["hermes"]
    if "SmolLM" in source:
        return TOOL_FORMATS["smollm2"]
    if "<|start_header_id|>" in source or "<|python_tag|>" in source:
        return TOOL_FORMATS["llama3"]
    return TOOL_FORMATS["hermes"]
