"""One answer's way from text to parts: reasoning first, then text and calls. Knows no wire form."""

from __future__ import annotations

from collections.abc import Callable

from firstlight.text.stops import StopMatcher
from firstlight.text.tool_parsers.calls import CallParser, Part
from firstlight.text.tool_parsers.formats import ToolFormat

__all__ = ["AnswerParser", "Part"]

THINK, END_THINK = "<think>", "</think>"


class AnswerParser:
    """Takes an answer apart while it grows. One writer: the stream that owns it.

    Args:
        form: how the model writes calls; None leaves them text.
        has_reasoning: what stands between `<think>` and `</think>` at the beginning is reasoning.
        is_thinking: the prompt ended with `<think>`, so the answer begins inside.
        new_id: gives each call its id.
    """

    def __init__(
        self, form: ToolFormat | None, new_id: Callable[[], str], *, has_reasoning: bool, is_thinking: bool = False
    ) -> None:
        self._calls = CallParser(form, new_id) if form is not None else None
        self._opening = "" if has_reasoning and not is_thinking else None
        """What may still become `<think>`; None once that is decided."""
        self._thinking = StopMatcher([END_THINK]) if is_thinking else None
        self._skips_breaks = False

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.num_calls if self._calls is not None else 0

    def push(self, text: str) -> list[Part]:
        """The parts that more text completes."""
        parts: list[Part] = []
        if self._opening is not None:
            text = self._opened(text)
        if self._thinking is not None and text:
            shown, found = self._thinking.push(text)
            parts += [Part("reasoning", shown)] if shown else []
            text = "" if found is None else text[len(text) - self._thinking.num_unread :]
            if found is not None:
                self._thinking, self._skips_breaks = None, True
        return _merged(parts + self._answer(text)) if self._thinking is None else parts

    def finish(self) -> list[Part]:
        """What was still held back."""
        parts: list[Part] = []
        if self._thinking is not None and (held := self._thinking.finish()):
            parts.append(Part("reasoning", held))
        if self._opening:
            opening, self._opening = self._opening, None
            parts += self._answer(opening)
        return _merged(parts + (self._calls.finish() if self._calls is not None else []))

    def _opened(self, text: str) -> str:
        """The text behind `<think>`, or all of it once it is clear that there is none; "" while that is open."""
        assert self._opening is not None
        seen = self._opening + text
        begin = seen.lstrip()
        if begin.startswith(THINK):
            self._opening, self._thinking = None, StopMatcher([END_THINK])
            return begin[len(THINK) :]
        if THINK.startswith(begin):
            self._opening = seen
            return ""
        self._opening = None
        return seen

    def _answer(self, text: str) -> list[Part]:
        if self._skips_breaks:
            text = text.lstrip("\r\n")
            self._skips_breaks = not text
        if not text:
            return []
        return self._calls.push(text) if self._calls is not None else [Part("content", text)]


def _merged(parts: list[Part]) -> list[Part]:
    """The parts with neighbours of one kind joined, so that one push gives few frames."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        is_same = last is not None and (last.kind, last.nth) == (part.kind, part.nth) and part.call_id is None
        if last is not None and is_same:
            merged[-1] = last._replace(text=last.text + part.text)
        else:
            merged.append(part)
    return merged
