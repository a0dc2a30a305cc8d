"""Draft tokens: guesses at what comes next, checked in the step that computes them. Knows token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Drafter", "accept"]


class Drafter(Protocol):
    """Guesses the next tokens of a request. A wrong guess costs time and never changes the answer."""

    def __call__(self, request_id: str, tokens: list[int], max_drafts: int) -> list[int]:
        """At most `max_drafts` ids to follow `tokens` (prompt and output so far, not to be changed)."""


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafts stand: the leading ones that equal what was sampled at their position."""
    num = 0
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token:
            break
        num += 1
    return num
