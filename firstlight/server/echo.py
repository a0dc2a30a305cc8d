"""A prompt that comes back with its answer, and where each token begins in their text. Knows bytes, not tokenizers."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

__all__ = ["Echo", "TextOffset"]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes back with the answer."""

    text: str
    tokens: list[tuple[int, bool]]
    """Ids, and whether they are special and so not in the text; empty where no logprobs are wanted."""

    def shown(self, raws: list[bytes]) -> list[bytes]:
        """What each token adds to the text, given the bytes each stands for.

        A tokenizer may put a space before the text that is no part of it.
        """
        shown = [b"" if is_special else raw for raw, (_, is_special) in zip(raws, self.tokens, strict=True)]
        first = next((at for at, raw in enumerate(shown) if raw), None)
        if first is not None and shown[first].startswith(b" ") and not self.text.startswith(" "):
            shown[first] = shown[first][1:]
        return shown


class TextOffset:
    """Where each token begins in the text, in characters; a token inside a code point begins where that one does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def begin_at(self, num_chars: int) -> None:
        """The next token begins there."""
        self._num_chars = num_chars

    def before(self, raw: bytes) -> int:
        """Where the token with these bytes begins, which comes next."""
        start = self._num_chars
        self._num_chars += len(self._decoder.decode(raw))
        return start
