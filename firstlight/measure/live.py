"""The last minute of a server in a few figures: for a page that shows them live. Knows durations and counts.

Written and read on one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from firstlight.measure.percentile import percentile

__all__ = ["LiveWindow", "percentiles_ms"]

WINDOW_S = 60.0
RATE_WINDOW_S = 5.0
MAX_FRAMES = 16_384
"""Tokens, or groups that left together; at more than 270 a second the window is shorter than a minute."""
MAX_FIRSTS = 4096


class LiveWindow:
    """First-token times, gaps and token counts of the last WINDOW_S."""

    def __init__(self) -> None:
        self._firsts: deque[tuple[float, float]] = deque(maxlen=MAX_FIRSTS)
        self._tokens: deque[tuple[float, int, float | None]] = deque(maxlen=MAX_FRAMES)
        self.num_tokens = 0

    def first_token(self, now_s: float, ttft_s: float) -> None:
        """A request's first token has left."""
        self._firsts.append((now_s, ttft_s))

    def tokens(self, now_s: float, num: int, gap_s: float | None) -> None:
        """So many tokens of a choice have left, `gap_s` after the ones before them."""
        self.num_tokens += num
        self._tokens.append((now_s, num, gap_s))

    def snapshot(self, now_s: float) -> dict[str, object]:
        """Percentiles over the window in milliseconds, tokens per second over the last RATE_WINDOW_S."""
        _drop_before(self._firsts, now_s - WINDOW_S)
        _drop_before(self._tokens, now_s - WINDOW_S)
        since_s = now_s - RATE_WINDOW_S
        recent = 0
        for at_s, num, _ in reversed(self._tokens):
            if at_s < since_s:
                break
            recent += num
        return {
            "window_s": WINDOW_S,
            "ttft_ms": percentiles_ms([ttft_s for _, ttft_s in self._firsts]),
            "itl_ms": percentiles_ms([gap_s for _, _, gap_s in self._tokens if gap_s is not None]),
            "output_tokens_per_s": recent / RATE_WINDOW_S,
            "output_tokens": self.num_tokens,
        }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99, and how many there are."""
    ordered = sorted(seconds)
    known: dict[str, float | None] = {"num": len(ordered)}
    for percent in (50, 95, 99):
        value = percentile(ordered, percent)
        known[f"p{percent}"] = None if value is None else value * 1e3
    return known


def _drop_before(stamped: deque[Any], since_s: float) -> None:
    while stamped and stamped[0][0] < since_s:
        stamped.popleft()
