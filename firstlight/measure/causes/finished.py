"""Finished requests, the recent and, for longer, the slow ones. Bounded by number and by the steps they refer to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from firstlight.measure.causes.book import Trace
from firstlight.measure.causes.timeline import Span, Stamps, timeline

__all__ = ["FinishedRequest", "FinishedRing", "SlowBy"]

NUM_RECENT = 512
NUM_SLOW = 256
MAX_STEP_REFS = 40_000
"""In each of the two rings: about 15 MB where every step has few rows."""

SlowBy = Literal["e2e", "ttft", "gap"]


@dataclass(slots=True, kw_only=True)
class FinishedRequest:
    """What there is to know of one request that has ended; never its text."""

    answer_id: str
    request_id: str
    route: str
    status: int
    finish: str
    """Finish reasons of its choices, or why it ended early."""
    is_stream: bool
    arrival_unix_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    longest_gap_s: float
    """The longest time between two writes with tokens of one choice."""
    gap_end_s: float | None
    stamps: Stamps
    cache_miss: tuple[int, str] | None = None
    """The first token of a block that was not found in the prefix cache, and why; None where all were, or unknown."""
    traces: list[Trace] = field(default_factory=list)
    """One per choice."""
    traceparent: str = ""
    """The caller's span (W3C Trace Context), as its header gave it."""
    taken_s: float | None = None
    """When the client's machine had the last byte, or had not yet; None where it took it at once, or nobody can say."""

    @property
    def e2e_s(self) -> float:
        return self.stamps.end_s - self.stamps.arrival_s

    @property
    def delivery_s(self) -> float:
        """How long after its end the client, or the network, still had not taken all of the answer."""
        return 0.0 if self.taken_s is None else max(0.0, self.taken_s - self.stamps.end_s)

    @property
    def trace(self) -> Trace | None:
        """Of the choice that ended last."""
        ended = [trace for trace in self.traces if trace.end_s is not None]
        return max(ended, key=lambda trace: trace.end_s or 0.0) if ended else next(iter(self.traces), None)

    def spans(self) -> list[Span]:
        """Its whole life by cause. Cost: some microseconds per step it was in."""
        return timeline(self.stamps, self.trace)

    def num_steps(self) -> int:
        return sum(len(trace.steps) for trace in self.traces)


class FinishedRing:
    """Written and read on one thread.

    Args:
        slow_ttft_s: a request whose first token took longer is slow.
        slow_gap_s: so is one with a longer gap between tokens.
    """

    def __init__(self, slow_ttft_s: float, slow_gap_s: float) -> None:
        self._slow_ttft_s = slow_ttft_s
        self._slow_gap_s = slow_gap_s
        self._recent = _Ring(NUM_RECENT)
        self._slow = _Ring(NUM_SLOW)
        self.num_added = 0

    def add(self, request: FinishedRequest) -> None:
        """Keeps the request, and forgets the oldest that are too many."""
        self.num_added += 1
        self._recent.add(request)
        if self.is_slow(request):
            self._slow.add(request)

    def is_slow(self, request: FinishedRequest) -> bool:
        """It missed one of the two objectives, or never got a first token."""
        ttft_s = request.e2e_s if request.ttft_s is None else request.ttft_s
        return ttft_s > self._slow_ttft_s or request.longest_gap_s > self._slow_gap_s

    def recent(self, num: int) -> list[FinishedRequest]:
        """The last `num` to end, the newest first."""
        return list(reversed(self._recent.requests))[:num]

    def slowest(self, num: int, by: SlowBy = "e2e") -> list[FinishedRequest]:
        """The `num` slowest of all that are kept, the slowest first."""
        key = {"e2e": _e2e_s, "ttft": _ttft_s, "gap": _gap_s}[by]
        return sorted(self._all(), key=key, reverse=True)[:num]

    def find(self, name: str) -> FinishedRequest | None:
        """The latest request with this answer id or X-Request-Id."""
        return next((r for r in self._all() if name in (r.answer_id, r.request_id)), None)

    def _all(self) -> Iterator[FinishedRequest]:
        """Each once, the recent ones first, newest first."""
        seen = set()
        for request in (*reversed(self._recent.requests), *reversed(self._slow.requests)):
            if id(request) not in seen:
                seen.add(id(request))
                yield request


class _Ring:
    def __init__(self, most: int) -> None:
        self.requests: deque[FinishedRequest] = deque()
        self._most = most
        self._num_refs = 0

    def add(self, request: FinishedRequest) -> None:
        self.requests.append(request)
        self._num_refs += request.num_steps()
        while len(self.requests) > self._most or (self._num_refs > MAX_STEP_REFS and len(self.requests) > 1):
            self._num_refs -= self.requests.popleft().num_steps()


def _e2e_s(request: FinishedRequest) -> float:
    return request.e2e_s + request.delivery_s


def _ttft_s(request: FinishedRequest) -> float:
    return request.e2e_s if request.ttft_s is None else request.ttft_s


def _gap_s(request: FinishedRequest) -> float:
    return request.longest_gap_s
