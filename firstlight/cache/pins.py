"""Pinned prefixes: blocks that are not evicted until a time, within a quota. Knows block ids, keys and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from firstlight.cache.pool import BlockPool

__all__ = ["Pins"]

TENANT_SHARE = 1 / 4
"""Of the quota, what one API key's pins may hold, so that no key keeps the others from pinning."""


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
        self._tenants: dict[int, bytes] = {}
        """Who pinned a block first."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned now."""
        return len(self._until_s)

    def held_by(self, tenant: bytes) -> int:
        """Blocks that this tenant was the first to pin. Cost: O(pinned blocks)."""
        return sum(owner == tenant for owner in self._tenants.values())

    def add(self, blocks: list[int], until_s: float, tenant: bytes = b"") -> int:
        """Pins a prefix's blocks, first to last, as far as the quota goes; a longer time on any of them stands.

        Args:
            tenant: may hold TENANT_SHARE of the quota; empty, for the operator and where there are no keys, all of it.

        Returns: how many of them are pinned now.
        """
        most = min(self.max_blocks, int(TENANT_SHARE * self.max_blocks) or 1) if tenant else self.max_blocks
        left = min(most - self.held_by(tenant), self.max_blocks - len(self._until_s))
        for num, block in enumerate(blocks):
            if block not in self._until_s:
                if left <= 0:
                    return num
                left -= 1
                self._pool.lock([block])
                self._until_s[block] = until_s
                self._tenants[block] = tenant
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
            del self._until_s[block], self._tenants[block]
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
