"""One call read character by character: its name, then its arguments as they come. Knows JSON, no marks."""

from __future__ import annotations

import json
from typing import NamedTuple

__all__ = ["CallScanner", "ScannedCall"]

_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class ScannedCall(NamedTuple):
    """What one push gave: the name once it is known, more text of the arguments, whether the call is over."""

    name: str | None
    arguments: str
    is_done: bool


class CallScanner:
    """Reads one JSON object from its brace on. One writer.

    With `name` given the object is the arguments themselves, else an object with a name and arguments, in any order.
    Arguments that are a JSON string (some models write them so) are given unquoted, once they are whole.
    `is_broken` is set when the text is no such object; nothing more is given then.
    """

    def __init__(self, name: str | None = None) -> None:
        self.is_broken = False
        self.name = name
        self._is_bare = name is not None
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._key = ""
        self._value: list[str] | None = None
        """The characters of the value being read at the object's own level; None between values."""
        self._token: list[str] = []
        self._expects_key = True
        self._held = ""
        self._has_arguments = False
        self._is_done = False

    def push(self, text: str) -> tuple[ScannedCall, int]:
        """Reads on. Returns: what came of it, and how many characters were read (fewer once the call is over)."""
        known = self.name
        for at, character in enumerate(text):
            self._read(character)
            if self._is_done or self.is_broken:
                return self._result(known), at + 1
        return self._result(known), len(text)

    def _result(self, known: str | None) -> ScannedCall:
        if self.is_broken or self.name is None:
            return ScannedCall(None, "", False)
        if self._is_done and not self._has_arguments and not self._is_bare:
            self._held += "{}"
        arguments, self._held = self._held, ""
        return ScannedCall(None if known is not None else self.name, arguments, self._is_done)

    def _read(self, character: str) -> None:
        if self._is_bare:
            self._held += character
        elif self._value is not None:
            self._read_value(character)
            return
        self._move(character)
        if self._depth == 0:
            self._is_done = self._is_bare or self.name is not None
            self.is_broken = not self._is_done
        elif not self._is_bare:
            self._read_between(character)

    def _move(self, character: str) -> None:
        """Keeps track of strings and nesting."""
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = False
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _read_between(self, character: str) -> None:
        """At the object's own level, outside a value: the brace, a key, a colon, a comma."""
        if self._expects_key:
            if self._is_in_string or character == '"':
                self._token.append(character)
                if not self._is_in_string:
                    self._key, self._token = self._decoded_key(), []
                    self._expects_key = False
            elif character not in _SPACE + "{,":
                self.is_broken = True
        elif character == ":":
            self._value = []
        elif character not in _SPACE:
            self.is_broken = True

    def _decoded_key(self) -> str:
        try:
            return str(json.loads("".join(self._token), strict=False))
        except ValueError:
            self.is_broken = True
            return ""

    def _read_value(self, character: str) -> None:
        assert self._value is not None
        if not self._value and character in _SPACE:
            return
        is_outside = self._depth == 1 and not self._is_in_string
        if is_outside and self._value and character in ",}":  # ends a number, true, false, null
            self._end_value()
        if self._value is None:
            self._expects_key = True
            self._move(character)
            if self._depth == 0:
                self._is_done = self.name is not None
                self.is_broken = not self._is_done
            return
        self._move(character)
        self._value.append(character)
        if self._is_streamed():
            self._held += character
        if self._depth < 1:
            self.is_broken = True
        elif self._depth == 1 and not self._is_in_string and character in '"}]':
            self._end_value()

    def _is_streamed(self) -> bool:
        return self._key in _ARGUMENT_KEYS and self._value is not None and self._value[0] == "{"

    def _end_value(self) -> None:
        assert self._value is not None
        raw = "".join(self._value)
        is_streamed = self._is_streamed()
        self._value = None
        self._expects_key = True
        if self._key in _ARGUMENT_KEYS:
            self._has_arguments = True
            if not is_streamed:
                self._held += self._unquoted(raw)
        elif self._key == "name" and self.name is None:
            self.name = self._unquoted(raw) if raw.startswith('"') else None
            self.is_broken = not self.name

    def _unquoted(self, raw: str) -> str:
        """A JSON string's text; null arguments are none; anything else as it is."""
        if raw == "null":
            return "{}"
        if not raw.startswith('"'):
            return raw
        try:
            return str(json.loads(raw, strict=False))
        except ValueError:
            self.is_broken = True
            return ""
