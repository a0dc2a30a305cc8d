"""Which free block is reused next. Knows block ids in the order they were freed, nothing of requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

__all__ = ["EvictionPolicy", "LruEviction"]


class EvictionPolicy(Protocol):
    """Chooses among blocks that nobody holds."""

    def victim(self, free: OrderedDict[int, None]) -> int:
        """The block to reuse next; `free` is never empty and must not be changed.

        Its order: blocks that no later request can hit first, then the others from longest to shortest freed.
        """


class LruEviction:
    """Reuses the block that has been free for longest. Cost: O(1)."""

    def victim(self, free: OrderedDict[int, None]) -> int:
        return next(iter(free))
