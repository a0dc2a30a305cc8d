"""Keeps what is likeliest to be used again soon, by how often and how long ago it was used. Learned as it runs.

Knows keys and a clock that counts admitted requests; no seconds, so that it learns alike from fast and slow traffic.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence

from firstlight.cache.ranked import num_remembered

__all__ = ["ReuseShadow"]

AGES: list[int] = [0, 1, 2, 3, 4, 6, 9, 13, 19, 27, 39, 57, 83, 120, 174, 253, 366, 531, 770, 1117, 1619, 2348, 3404]
"""Where a bucket of ages begins, in requests admitted since the last use; each 1.45 times the last. Use after the last
age counts as a first use."""
NUM_AGES = len(AGES) - 1
USES: list[int] = [1, 2, 3, 4, 5, 7, 11, 21]
"""Where a class begins, in uses so far."""
MEMORY = 0.9998
"""Weight of what was seen against the same one request later: about the last 5,000 count."""
PRIOR_BLOCKS = 30.0
"""A class is believed to be like all blocks until about so many of its own were used again: one prompt's blocks are
used together, so that they say the same thing this many times."""
REFIT_EVERY = 100
EARLY_REFIT_EVERY = 20
EPSILON = 1e-9


class _Cohort:
    """Blocks of one class that were used last when the same request was admitted: the same chance of being used."""

    __slots__ = ("bucket", "leaves", "live", "tick", "uses")

    def __init__(self, tick: int, uses: int) -> None:
        self.tick = tick
        self.uses = uses
        self.bucket = 0
        self.live = 0
        """Keys, cached or not, that were not used since."""
        self.leaves: dict[bytes, None] = {}
        """Its keys that may be given up."""


class _Rates:
    """How many blocks of a class and age were used again, how many block-requests they were watched for."""

    def __init__(self) -> None:
        self.used = [[0.0] * NUM_AGES for _ in USES]
        self.watched = [[0.0] * NUM_AGES for _ in USES]
        self.index = [[1.0 / (1 + AGES[k + 1]) for k in range(NUM_AGES)] for _ in USES]
        """What a block is worth: the most uses per request of keeping it, over every time to give it up again."""

    def refit(self, num_requests: int) -> None:
        """Works the indices out anew from what was seen. Cost: some milliseconds."""
        totals = [sum(column) for column in zip(*self.used, strict=True)]
        times = [sum(column) for column in zip(*self.watched, strict=True)]
        mean = (sum(totals) + 1) / (sum(times) + 1000)
        base = [(total + 20 * mean) / (time + 20) for total, time in zip(totals, times, strict=True)]
        for c in range(len(USES)):
            expected = sum(rate * time for rate, time in zip(base, self.watched[c], strict=True))
            factor = (sum(self.used[c]) + PRIOR_BLOCKS) / (expected + PRIOR_BLOCKS)
            rates = []
            for k in range(NUM_AGES):
                prior = max(EPSILON, base[k] * factor)
                rate = (self.used[c][k] + PRIOR_BLOCKS) / (self.watched[c][k] + PRIOR_BLOCKS / prior)
                rates.append(min(0.9, rate))
            self.index[c] = _indices(rates)
        kept = MEMORY**num_requests
        self.used = [[kept * x for x in row] for row in self.used]
        self.watched = [[kept * x for x in row] for row in self.watched]


def _indices(rates: list[float]) -> list[float]:
    """Gittins' index at each age: the best ratio of chance of use to expected time kept, over all times to give up.

    Source: Gittins, "Bandit processes and dynamic allocation indices" (1979): with independent blocks, keeping those
    with the largest index gives the most uses for the memory.
    """
    spans = [AGES[k + 1] - AGES[k] for k in range(NUM_AGES)]
    stays = [(1 - rate) ** span for rate, span in zip(rates, spans, strict=True)]
    times = [(1 - stay) / rate for stay, rate in zip(stays, rates, strict=True)]
    index = []
    for first in range(NUM_AGES):
        alive, chance, time, best = 1.0, 0.0, 0.0, 0.0
        for k in range(first, NUM_AGES):
            chance += alive * (1 - stays[k])
            time += alive * times[k]
            alive *= stays[k]
            best = max(best, chance / time)
        index.append(best)
    return index


class ReuseShadow:
    """Gives up the key with the smallest expected use per request of keeping it; leaves only."""

    def __init__(self, num_blocks: int) -> None:
        self.kept: dict[bytes, _Cohort] = {}
        self._rates = _Rates()
        self._tick = 0
        self._recent: deque[list[_Cohort]] = deque(maxlen=AGES[-1] + 1)
        """The cohorts of the last requests, the newest last."""
        self._now: dict[int, _Cohort] = {}
        self._most = num_remembered(num_blocks)
        self._last: OrderedDict[bytes, tuple[_Cohort, int]] = OrderedDict()
        """Of each key, kept or not, the cohort it is in and its uses."""
        self._offered: dict[tuple[int, int], OrderedDict[_Cohort, None]] = {}
        """By class and age, the cohorts with leaves that may be given up."""
        self._parents: dict[bytes, bytes] = {}
        self._num_children: dict[bytes, int] = {}
        self._held: frozenset[bytes] = frozenset()

    def hold(self, keys: Sequence[bytes]) -> None:
        self._held = frozenset(keys)
        for key in keys:
            if key not in self._num_children:
                self._withdraw(self.kept[key], key)

    def evict(self, num: int) -> list[bytes]:
        index = self._rates.index
        heap = [(index[uses][age], -age, uses) for uses, age in self._offered]
        heapq.heapify(heap)
        evicted: list[bytes] = []
        while len(evicted) < num:
            _, negative_age, uses = heap[0]
            cohorts = self._offered.get((uses, -negative_age))
            if cohorts is None:
                heapq.heappop(heap)
                continue
            cohort = next(iter(cohorts))
            key = next(reversed(cohort.leaves))
            self._withdraw(cohort, key)
            evicted.append(key)
            before = self._leave_tree(key)
            if before is not None:
                heapq.heappush(heap, (index[before.uses][before.bucket], -before.bucket, before.uses))
        return evicted

    def _leave_tree(self, key: bytes) -> _Cohort | None:
        """Forgets a leaf; the cohort of the key before it, where that is on offer now."""
        del self.kept[key]
        parent = self._parents.pop(key, None)
        if parent is None:
            return None
        self._num_children[parent] -= 1
        if self._num_children[parent]:
            return None
        del self._num_children[parent]
        if parent in self._held:
            return None
        self._offer(self.kept[parent], parent)
        return self.kept[parent]

    def take(self, keys: Sequence[bytes], first_used: int) -> None:
        if first_used == 0:
            self._begin_request()
        for i, key in enumerate(keys):
            if key not in self.kept and i:
                parent = self._parents[key] = keys[i - 1]
                self._num_children[parent] = self._num_children.get(parent, 0) + 1
            if i >= first_used or key not in self.kept:
                self.kept[key] = self._use(key)
        self._held = frozenset()
        if keys and keys[-1] not in self._num_children:
            self._offer(self.kept[keys[-1]], keys[-1])

    def _begin_request(self) -> None:
        self._recent.append(list(self._now.values()))
        self._now = {}
        self._tick += 1
        self._age()
        if self._tick % (REFIT_EVERY if self._tick > 2 * REFIT_EVERY else EARLY_REFIT_EVERY) == 0:
            self._rates.refit(REFIT_EVERY)

    def _age(self) -> None:
        """Moves every cohort that has reached an age's end to the next, and notes that its blocks were not used."""
        recent = self._recent
        for k in range(1, len(AGES)):
            if AGES[k] > len(recent):
                break
            for cohort in recent[-AGES[k]]:
                watched = self._rates.watched[cohort.uses]
                watched[k - 1] += cohort.live * (AGES[k] - AGES[k - 1])
                if cohort.leaves:
                    self._leave(cohort)
                    cohort.bucket = min(k, NUM_AGES - 1)
                    self._offered.setdefault((cohort.uses, cohort.bucket), OrderedDict())[cohort] = None
                cohort.bucket = min(k, NUM_AGES - 1)

    def _use(self, key: bytes) -> _Cohort:
        """Counts one more use; the cohort the key belongs to from now on."""
        uses = 1
        before = self._last.pop(key, None)
        if before is not None:
            cohort, uses_before = before
            cohort.live -= 1
            age = self._tick - cohort.tick
            if age < AGES[-1]:
                k = bisect.bisect_right(AGES, age) - 1
                self._rates.used[cohort.uses][k] += 1
                self._rates.watched[cohort.uses][k] += age - AGES[k]
                uses = uses_before + 1
        kind = bisect.bisect_right(USES, uses) - 1
        cohort = self._now.get(kind) or self._now.setdefault(kind, _Cohort(self._tick, kind))
        cohort.live += 1
        self._last[key] = (cohort, uses)
        if len(self._last) > self._most:
            self._last.popitem(last=False)[1][0].live -= 1
        return cohort

    def _offer(self, cohort: _Cohort, key: bytes) -> None:
        if not cohort.leaves:
            self._offered.setdefault((cohort.uses, cohort.bucket), OrderedDict())[cohort] = None
        cohort.leaves[key] = None

    def _withdraw(self, cohort: _Cohort, key: bytes) -> None:
        del cohort.leaves[key]
        if not cohort.leaves:
            self._leave(cohort)

    def _leave(self, cohort: _Cohort) -> None:
        place = (cohort.uses, cohort.bucket)
        del self._offered[place][cohort]
        if not self._offered[place]:
            del self._offered[place]
