"""Pinned prefixes: blocks that are not evicted until a time, within a quota. Knows block ids, keys and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from firstlight.cache.pool import BlockPool

__all__ = ["Pins"]


class Pins:
    """Holds a reference to every pinned block, as a request would. Written by KVCache alone.

    Args:
        max_blocks: blocks that all pins together may hold; what does not fit is not pinned.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_yielded = 0
        """Pins given up early, because the only running request needed their blocks."""
        self._pool = pool
        self._until_s: dict[int, float] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned now."""
        return len(self._until_s)

    def add(self, blocks: list[int], until_s: float) -> int:
        """Pins a prefix's blocks, first to last, as far as the quota goes; a longer time on any of them stands.

        Returns: how many of them are pinned now.
        """
        for num, block in enumerate(blocks):
            if block not in self._until_s:
                if len(self._until_s) >= self.max_blocks:
                    return num
                self._pool.lock([block])
                self._until_s[block] = until_s
            self._until_s[block] = max(self._until_s[block], until_s)
        return len(blocks)

    def expire(self, now_s: float) -> None:
        """Gives back what was pinned until now. Cost: O(pinned blocks)."""
        self._release([block for block, until_s in self._until_s.items() if until_s <= now_s])

    def give_up(self) -> bool:
        """Gives back the pins that would end first; False where nothing is pinned."""
        if not self._until_s:
            return False
        self.num_yielded += 1
        self.expire(min(self._until_s.values()))
        return True

    def forget(self, block: int) -> None:
        """Gives one block back, if it is pinned."""
        if block in self._until_s:
            self._release([block])

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            del self._until_s[block]
        self._pool.release(reversed(blocks))

    @property
    def first_end_s(self) -> float:
        """When the first pin ends; infinity without any that does."""
        return min(self._until_s.values(), default=math.inf)

    def table(self) -> list[int]:
        """Every pinned block, for audits."""
        return list(self._until_s)

    def __iter__(self) -> Iterator[int]:
        return iter(self._until_s)
