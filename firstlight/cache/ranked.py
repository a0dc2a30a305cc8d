"""Policies that rank a block when it is freed: lru, lfu and gdsf. Knows keys and how often each was used."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from firstlight.cache.eviction import IgnoresRequests

__all__ = ["GdsfEviction", "LfuEviction", "LruEviction", "UseCounts", "num_remembered"]

REMEMBERED_PER_BLOCK = 16
MIN_REMEMBERED = 131_072


def num_remembered(num_blocks: int) -> int:
    """How many keys, evicted ones included, a policy keeps a count of; about 150 bytes each."""
    return max(MIN_REMEMBERED, REMEMBERED_PER_BLOCK * num_blocks)


class UseCounts:
    """How often each key was used, evicted ones included; the longest unused are forgotten beyond `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def add(self, key: bytes) -> int:
        """Counts one more use; how many there were."""
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)
        return count


class RankedBlocks:
    """The blocks on offer, smallest rank first; of equal ranks the longest freed. Cost: O(log n) a change."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[float, int]] = {}
        self._offered: set[int] = set()
        self._heap: list[tuple[float, int, int]] = []
        self._num_freed = 0

    def rank(self, block: int, value: float) -> None:
        """Ranks a block that was freed just now."""
        self._num_freed += 1
        self._ranks[block] = (value, self._num_freed)

    def offer(self, block: int) -> None:
        self._offered.add(block)
        heapq.heappush(self._heap, (*self._ranks[block], block))
        if len(self._heap) > 64 + 4 * len(self._offered):
            self._heap = [(*self._ranks[block], block) for block in self._offered]
            heapq.heapify(self._heap)

    def withdraw(self, block: int) -> None:
        self._offered.remove(block)

    def first(self) -> tuple[int, float]:
        """The block with the smallest rank, and its rank's value."""
        while True:
            value, freed, block = self._heap[0]
            if block in self._offered and self._ranks[block] == (value, freed):
                return block, value
            heapq.heappop(self._heap)


class LruEviction(IgnoresRequests):
    """Evicts what was given back longest ago."""

    def __init__(self) -> None:
        self._blocks = RankedBlocks()
        self.offered, self.withdrawn = self._blocks.offer, self._blocks.withdraw

    def used(self, block: int, key: bytes) -> None:
        """Counts when it is given back."""

    def freed(self, block: int) -> None:
        self._blocks.rank(block, 0.0)

    def victim(self) -> int:
        return self._blocks.first()[0]


class LfuEviction(IgnoresRequests):
    """Evicts what was used least often, uses before an eviction included; of those the longest unused."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = RankedBlocks()
        self.offered, self.withdrawn = self._blocks.offer, self._blocks.withdraw
        self._uses = UseCounts(num_remembered(num_blocks))
        self._count = [0] * num_blocks

    def used(self, block: int, key: bytes) -> None:
        self._count[block] = self._uses.add(key)

    def freed(self, block: int) -> None:
        self._blocks.rank(block, self._count[block])

    def victim(self) -> int:
        return self._blocks.first()[0]


class GdsfEviction(IgnoresRequests):
    """Greedy-dual: evicts the smallest of uses since it came + the rank of the last evicted when it was used last.

    Source: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching" (1998). Every block
    has the same size, and costs about the same to compute, so both are 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks = RankedBlocks()
        self.offered, self.withdrawn = self._blocks.offer, self._blocks.withdraw
        self._keys: list[bytes] = [b""] * num_blocks
        self._count = [0] * num_blocks
        self._level = 0.0

    def used(self, block: int, key: bytes) -> None:
        self._count[block] = self._count[block] + 1 if self._keys[block] == key else 1
        self._keys[block] = key

    def freed(self, block: int) -> None:
        self._blocks.rank(block, self._level + self._count[block])

    def victim(self) -> int:
        block, value = self._blocks.first()
        self._level = max(self._level, value)
        self._keys[block] = b""
        return block
