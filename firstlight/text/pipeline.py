"""One choice's way from ids to shown text: detokenizer, then stop strings. Knows nothing of requests or transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from firstlight.text.detokenizer import IncrementalDetokenizer
from firstlight.text.stops import StopMatcher
from firstlight.text.tokenizer import Tokenizer

__all__ = ["TextPipeline", "TextStep"]


class TextStep(NamedTuple):
    """What one push gave.

    `num_ids` is how many of the pushed ids belong to the answer: all of them, or up to and including the one that
    completed the stop string `stop`.
    """

    text: str
    num_ids: int
    stop: str | None


class TextPipeline:
    """Turns ids into text that may be shown. One writer: the stream that owns it.

    All ids of a push are decoded at once; the id that completed a stop string is looked for only when there is one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
        is_continuation: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special=skip_special, shown=shown, is_continuation=is_continuation
        )
        self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._has_stops = bool(stops)

    def push(self, ids: Sequence[int]) -> TextStep:
        """The text that `ids` make safe to show. After a stop string, empty with `num_ids` 0."""
        if not self._has_stops:
            return TextStep(self._detokenizer.push(ids), len(ids), None)
        if self._matcher.matched is not None:
            return TextStep("", 0, self._matcher.matched)
        before = self._detokenizer.fork()
        decoded = self._detokenizer.push(ids)
        text, stop = self._matcher.push(decoded)
        if stop is None:
            return TextStep(text, len(ids), None)
        num_read = len(decoded) - self._matcher.num_unread
        return TextStep(text, _num_ids_until(before, ids, num_read), stop)

    def finish(self) -> TextStep:
        """The text still held: an open code point, the beginning of a stop string. Empty after a stop string."""
        if self._matcher.matched is not None:
            return TextStep("", 0, self._matcher.matched)
        text, stop = self._matcher.push(self._detokenizer.finish())
        return TextStep(text if stop is not None else text + self._matcher.finish(), 0, stop)


def _num_ids_until(detokenizer: IncrementalDetokenizer, ids: Sequence[int], num_characters: int) -> int:
    """How many of `ids` it takes to decode `num_characters`."""
    decoded = 0
    for index, token_id in enumerate(ids):
        decoded += len(detokenizer.push([token_id]))
        if decoded >= num_characters:
            return index + 1
    return len(ids)
