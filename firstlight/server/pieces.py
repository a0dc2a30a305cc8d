"""What a choice has gained since it was last looked at, and several of these as one. Knows no time and no transport."""

from __future__ import annotations

import msgspec

from firstlight.text.tool_parsers import Part
from firstlight.types import FinishReason, TokenLogprob

__all__ = ["Piece"]


class Piece(msgspec.Struct, frozen=True):
    """What one choice has gained since its last piece."""

    choice: int
    text: str
    logprobs: list[TokenLogprob] | None
    num_tokens: int
    finish: FinishReason | None
    parts: list[Part] | None = None
    """The text taken apart, where the answer is more than text."""
    has_calls: bool = False
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of the prompt's tokens from its second on: in a choice's first piece, where asked for."""

    def then(self, later: Piece) -> Piece:
        """This and what the same choice gained next, as one."""
        return Piece(
            self.choice,
            self.text + later.text,
            None if self.logprobs is None or later.logprobs is None else self.logprobs + later.logprobs,
            self.num_tokens + later.num_tokens,
            later.finish,
            None if self.parts is None or later.parts is None else self.parts + later.parts,
            later.has_calls,
            self.prompt_logprobs,
        )
