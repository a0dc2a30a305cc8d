"""Prompt lookup: what followed the last time that a request's latest tokens stood in it. Knows one request's ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["MAX_MATCH", "Lookup"]

MAX_MATCH = 8
"""Tokens of a match that are counted: a longer one is no better."""
NEEDLES = (3, 2, 1)
WINDOW = 4096
"""Latest tokens that are looked through. A search through all of them takes some 10 microseconds."""
_BYTES = 4


class Lookup:
    """The ids of one request as bytes, so that a search runs at memory's pace and needs no index."""

    __slots__ = ("_start", "_text")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._start = max(0, len(tokens) - WINDOW)
        self._text = bytearray(array("I", tokens[self._start :]).tobytes())

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(where in `tokens` that stands which followed last time, length of the match); a length of 0: nowhere.

        `tokens` are those of the last call and what has come since. The match is at most MAX_MATCH.
        """
        text = self._text
        text += array("I", tokens[self._start + len(text) // _BYTES :]).tobytes()
        if len(text) > 2 * WINDOW * _BYTES:
            self._start += WINDOW
            del text[: WINDOW * _BYTES]
        for num in NEEDLES:
            if (at := self._last(num)) >= 0:
                follows = self._start + at + num
                return follows, _match(tokens, follows, num, self._start)
        return 0, 0

    def _last(self, num: int) -> int:
        """The last place, in tokens, where the latest `num` stood before; -1: nowhere."""
        text = self._text
        needle = bytes(text[-num * _BYTES :])
        end = len(text) - _BYTES
        while True:
            at = text.rfind(needle, 0, end)
            if at % _BYTES == 0 or at < 0:
                return at // _BYTES
            end = at + len(needle) - 1  # between two tokens: no place


def _match(tokens: Sequence[int], follows: int, num: int, start: int) -> int:
    """How many tokens before `follows` equal the latest ones; `num` are known to."""
    end = len(tokens)
    while num < MAX_MATCH and follows - num > start and tokens[follows - num - 1] == tokens[end - num - 1]:
        num += 1
    return num
