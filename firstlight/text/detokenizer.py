"""Decodes a growing list of ids piece by piece. Knows ids and bytes, not stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from firstlight.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Gives the text of ids as they come, holding back the bytes of a code point until it is complete.

    Invariant: for every way of cutting ids into pushes, the texts of all pushes and of `finish` joined are
    `tokenizer.decode(ids, ...)` with the same options. One writer: the stream that owns it.

    Cost: linear in the bytes pushed; nothing that was pushed is looked at again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
        is_continuation: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._decoder = _utf8_decoder("replace")
        self._strips_next = tokenizer.strips_first_space and not is_continuation

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a code point is open."""
        raw = self._tokenizer.bytes_of(ids, skip_special=self._skip_special, shown=self._shown)
        return self._out(self._decoder.decode(raw))

    def finish(self) -> str:
        """What is still held: U+FFFD for a code point that never completed, else nothing."""
        return self._out(self._decoder.decode(b"", final=True))

    def fork(self) -> IncrementalDetokenizer:
        """A copy with the same held bytes, independent from here on."""
        copy = IncrementalDetokenizer(self._tokenizer, skip_special=self._skip_special, shown=self._shown)
        copy._decoder.setstate(self._decoder.getstate())
        copy._strips_next = self._strips_next
        return copy

    def _out(self, text: str) -> str:
        if self._strips_next and text:
            self._strips_next = False
            return text.removeprefix(" ")
        return text
