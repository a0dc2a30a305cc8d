"""The last minute of a server in a few figures: for a page that shows them live. Knows durations and counts.

Written and read on one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from firstlight.measure.percentile import percentile

__all__ = ["LiveWindow", "percentiles_ms"]

WINDOW_S = 60.0
RATE_WINDOW_S = 5.0
MAX_GAPS = 16_384
"""Gaps kept; at more than 270 tokens a second the window is shorter than a minute."""
MAX_FIRSTS = 4096


class LiveWindow:
    """First-token times, gaps and token counts of the last WINDOW_S."""

    def __init__(self) -> None:
        self._firsts: deque[tuple[float, float]] = deque(maxlen=MAX_FIRSTS)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MAX_GAPS)
        self._tokens: deque[tuple[float, int]] = deque(maxlen=MAX_GAPS)
        self.num_tokens = 0

    def first_token(self, now_s: float, ttft_s: float) -> None:
        """A request's first token has left."""
        self._firsts.append((now_s, ttft_s))

    def tokens(self, now_s: float, num: int, gap_s: float | None) -> None:
        """So many tokens of a choice have left, `gap_s` after the ones before them."""
        self.num_tokens += num
        self._tokens.append((now_s, num))
        if gap_s is not None:
            self._gaps.append((now_s, gap_s))

    def snapshot(self, now_s: float) -> dict[str, object]:
        """Percentiles over the window in milliseconds, tokens per second over the last RATE_WINDOW_S."""
        since_s = now_s - RATE_WINDOW_S
        recent = 0
        for at_s, num in reversed(self._tokens):
            if at_s < since_s:
                break
            recent += num
        return {
            "window_s": WINDOW_S,
            "ttft_ms": percentiles_ms(_inside(self._firsts, now_s - WINDOW_S)),
            "itl_ms": percentiles_ms(_inside(self._gaps, now_s - WINDOW_S)),
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


def _inside(stamped: deque[tuple[float, float]], since_s: float) -> list[float]:
    while stamped and stamped[0][0] < since_s:
        stamped.popleft()
    return [value for _, value in stamped]
