"""The queue: requests that hold no blocks, in the order they would be admitted. Knows ranks, deadlines and tenants."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from itertools import chain

from firstlight.scheduler.lengths import PRIOR_TOKENS
from firstlight.scheduler.state import RequestState, Status

__all__ = ["WaitingQueue", "rank_of"]


PART = 32
"""Waiting requests looked at before the next so many are fetched."""


def rank_of(state: RequestState) -> tuple[int, int, float, int]:
    return state.rank


def _in_parts(line: list[RequestState]) -> Iterator[RequestState]:
    """A sorted line, of which what was given may be removed meanwhile, without a copy of all of it."""
    part = line[:PART]
    while part:
        yield from part
        first = bisect.bisect_right(line, part[-1].rank, key=rank_of)
        part = line[first : first + PART]


class WaitingQueue:
    """One line per tenant, each sorted by rank; `ordered` merges them with what each tenant is set back.

    Written by the scheduler's thread; the counts may be read from any.
    """

    def __init__(self) -> None:
        self._lines: dict[bytes, list[RequestState]] = {}
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._num = self._output = 0
        self.num_returning = 0
        """Those that were preempted."""
        self.tokens = 0
        """Known tokens of all that wait: what admission would have to compute at most."""

    @property
    def mean_output(self) -> float:
        """Output tokens that those who wait may have, on the mean, while nothing is known of their kind."""
        return self._output / self._num if self._num else 0.0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[RequestState]:
        return chain.from_iterable(self._lines.values())

    def __contains__(self, state: RequestState) -> bool:
        return state in self._lines.get(state.request.tenant, ())

    def add(self, state: RequestState) -> None:
        """Puts a request where its rank says."""
        bisect.insort(self._lines.setdefault(state.request.tenant, []), state, key=rank_of)
        self._count(state, 1)
        if state.request.deadline_s is not None and state.status is Status.WAITING:
            heapq.heappush(self._deadlines, (state.request.deadline_s, state.rank[3], state))

    def remove(self, state: RequestState) -> None:
        """Takes a request out; its status still says why it waited."""
        line = self._lines[state.request.tenant]
        line.remove(state)
        if not line:
            del self._lines[state.request.tenant]
        self._count(state, -1)

    def _count(self, state: RequestState, sign: int) -> None:
        self._num += sign
        self._output += sign * min(state.max_tokens, PRIOR_TOKENS)
        self.tokens += sign * len(state.tokens)
        self.num_returning += sign * (state.status is Status.PREEMPTED)

    def ordered(self, excess: Callable[[bytes], float]) -> Iterator[RequestState]:
        """All, best first: priority, then preempted ones, then rank in tokens plus the tenant's `excess`.

        Those that were given already may be removed meanwhile. Most steps look at the first few only.
        """
        if len(self._lines) < 2:
            for line in list(self._lines.values()):
                yield from _in_parts(line)
            return
        setback = {tenant: excess(tenant) for tenant in self._lines}

        def key(state: RequestState) -> tuple[int, int, float, int]:
            priority, is_new, tokens, serial = state.rank
            return priority, is_new, tokens + is_new * setback[state.request.tenant], serial

        yield from list(heapq.merge(*self._lines.values(), key=key))

    def expired(self, now_s: float) -> list[RequestState]:
        """Requests that were never admitted and whose deadline has passed; still in the queue."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            state = heapq.heappop(self._deadlines)[2]
            if state.status is Status.WAITING:
                late.append(state)
        return late

    def next_deadline_s(self) -> float | None:
        """When `expired` may have something next."""
        while self._deadlines and self._deadlines[0][2].status is not Status.WAITING:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def oldest_arrival_s(self) -> float | None:
        """When the first of those that were never admitted came in; None without any."""
        arrivals = (state.request.arrival_s for state in self if state.status is Status.WAITING)
        return min(arrivals, default=None)

    def check(self) -> None:
        """Audits order and counts. Raises AssertionError."""
        for line in self._lines.values():
            assert line == sorted(line, key=rank_of), "the waiting queue is out of order"
        assert self._num == sum(1 for _ in self), "the waiting queue counts wrong"
        assert self.tokens == sum(len(state.tokens) for state in self), "the waiting queue counts tokens wrong"
        returning = sum(state.status is Status.PREEMPTED for state in self)
        assert self.num_returning == returning, "the waiting queue counts preempted requests wrong"
