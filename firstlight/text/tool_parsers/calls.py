"""Finds tool calls in streamed text. Knows one format; what is no call stays text."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Literal, NamedTuple

from firstlight.text.stops import StopMatcher
from firstlight.text.tool_parsers.formats import ToolFormat
from firstlight.text.tool_parsers.scanner import CallScanner, ScannedCall

__all__ = ["CallParser", "Part"]

_NAME = re.compile(r"[\w.\-]{1,64}")
_BETWEEN = " \t\r\n,;[]"


class Part(NamedTuple):
    """A piece of an answer.

    `kind` call: the call `nth` begins (`call_id` and `name` set), or its arguments go on by `text`.
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    nth: int = 0
    call_id: str | None = None
    name: str | None = None


class _Where(Enum):
    START = "start"
    """Nothing but white space yet: a bare call may begin."""
    TEXT = "text"
    MARKED = "marked"
    """Behind the opening mark, between calls."""
    NAME = "name"
    CALL = "call"


class CallParser:
    """Parts of a text in the order they stand in it. One writer.

    Text is held back only while it may still be a mark, or a call whose name is not known yet. White space beside calls
    is dropped; a text without calls comes out as it went in.

    Args:
        new_id: gives each call its id.
    """

    def __init__(self, form: ToolFormat, new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self._form = form
        self._new_id = new_id
        self._where = _Where.START
        self._matcher = StopMatcher([form.begin])
        self._scanner = CallScanner()
        self._raw = ""
        """What to give back as text if it turns out to be no call."""
        self._name = ""
        self._tail = ""
        """The beginning of the closing mark."""
        self._space = ""
        """White space that is text only if text follows, or if there are no calls."""
        self._has_content = False
        """Text was shown since the beginning or the last call."""
        self._is_open = False
        """The call being read was shown."""
        self._follows_call = False
        """Between the marks, a call came before."""
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """The parts that more text completes."""
        while text:
            if self._where is _Where.START:
                text = self._start(text)
            elif self._where is _Where.TEXT:
                text = self._text(text)
            elif self._where is _Where.CALL:
                text = self._call(text)
            else:
                text = self._marked(text)
        return self._taken()

    def finish(self) -> list[Part]:
        """What was still held back: text that never became a call. A call that was cut stays as it is."""
        if self._where is _Where.NAME:
            self._raw += self._name
        if self._where is _Where.TEXT:
            self._content(self._matcher.finish())
        elif self._where in (_Where.MARKED, _Where.NAME) or (self._where is _Where.CALL and self._scanner.name is None):
            self._give_back()
        if self.num_calls == 0 and self._space:
            self._parts.append(Part("content", self._space))
        self._space = ""
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # -- text -----------------------------------------------------------------------------------------------------

    def _start(self, text: str) -> str:
        bare = text.lstrip()
        if not bare or not self._form.is_bare:
            self._where = _Where.START if not bare else _Where.TEXT
            if not bare:
                self._space += text
                return ""
            return text
        self._space += text[: len(text) - len(bare)]
        if bare[0] != "{":
            self._where = _Where.TEXT
            return bare
        self._raw = ""
        self._begin_call()
        return bare

    def _text(self, text: str) -> str:
        shown, found = self._matcher.push(text)
        self._content(shown)
        if found is None:
            return ""
        rest = text[len(text) - self._matcher.num_unread :]
        self._matcher = StopMatcher([self._form.begin])
        self._raw = self._form.begin
        self._follows_call = False
        self._where = _Where.MARKED
        return rest

    def _content(self, text: str) -> None:
        """Shows text; white space at the edges waits until more text follows."""
        if not self._has_content and not text.strip():
            self._space += text
        elif text:
            if not self._has_content:
                text = text.lstrip() if self.num_calls else self._space + text
            self._space = ""
            self._has_content = True
            self._parts.append(Part("content", text))

    # -- calls ----------------------------------------------------------------------------------------------------

    def _marked(self, text: str) -> str:
        """Behind the opening mark: white space and separators, a call, the closing mark, or no call at all."""
        for at, character in enumerate(text):
            if self._where is _Where.NAME:
                if self._named(character):
                    return text[at:]
                if self._where is not _Where.NAME:
                    return text[at + 1 :]
                continue
            if self._tail or character == self._form.end[:1]:
                self._tail += character
                if self._tail == self._form.end:
                    self._raw += self._tail
                    self._close()
                    return text[at + 1 :]
                if not self._form.end.startswith(self._tail):
                    self._raw += self._tail
                    self._tail = ""
                    self._give_back()
                    return text[at + 1 :]
            elif character == "{":
                self._begin_call()
                return text[at:]
            elif self._form.has_named_calls and (character.isalnum() or character == "_"):
                self._where, self._name = _Where.NAME, character
            elif character == "[" and self._follows_call and not self._form.end:
                self._give_back()
                return text[at:]  # the opening mark again
            elif character in _BETWEEN:
                self._raw += character
            else:
                self._give_back()
                return text[at:]
        return ""

    def _named(self, character: str) -> bool:
        """Reads a name in front of its arguments. Returns: the arguments begin with this character."""
        name = self._name.removesuffix("[ARGS]").strip()
        if character == "{" and _NAME.fullmatch(name):
            self._scanner = CallScanner(name)
            self._where = _Where.CALL
            self._open_call(name)
            return True
        self._name += character
        if len(self._name) > 80 or not re.fullmatch(r"[\w.\-]+(\s*|\[A?R?G?S?\]?\s*)", self._name):
            self._raw += self._name
            self._give_back()
        return False

    def _begin_call(self) -> None:
        self._scanner = CallScanner()
        self._where = _Where.CALL

    def _call(self, text: str) -> str:
        got, num_read = self._scanner.push(text)
        if not self._is_open:
            self._raw += text[:num_read]
        self._take(got)
        if self._scanner.is_broken:
            if self._scanner.name is None or not self._is_open:
                self._give_back()
            else:
                self._end_call()
        elif got.is_done:
            self._end_call()
        return text[num_read:]

    def _take(self, got: ScannedCall) -> None:
        if got.name is not None:
            self._open_call(got.name)
        if got.arguments and self._is_open:
            self._parts.append(Part("call", got.arguments, self.num_calls - 1))

    def _open_call(self, name: str) -> None:
        self._parts.append(Part("call", "", self.num_calls, self._new_id(), name))
        self.num_calls += 1
        self._is_open = True
        self._space = ""
        self._has_content = False

    def _end_call(self) -> None:
        self._raw = ""
        self._is_open = False
        self._follows_call = True
        self._where = _Where.MARKED

    def _close(self) -> None:
        """The closing mark: text again. Marks with nothing between them are text."""
        self._tail = ""
        if not self._follows_call:
            self._give_back()
        self._raw = ""
        self._where = _Where.TEXT

    def _give_back(self) -> None:
        """What was held is text after all, or separators behind the last call."""
        raw, self._raw, self._tail = self._raw + self._tail, "", ""
        self._is_open = False
        self._where = _Where.TEXT
        if raw.strip(_BETWEEN):
            self._content(raw)
