"""A rendered chat prompt that remembers which of its characters the template wrote. Knows neither templates nor ids."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RenderedPrompt"]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What a chat template gave for some messages.

    `guarded` has the length of `text` and differs only in characters that came from the client and could be part of a
    control token: they are replaced, so that a control token found in `guarded` is one the template wrote.
    """

    text: str
    guarded: str
