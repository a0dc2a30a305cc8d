"""The policies by name."""

from __future__ import annotations

from firstlight.cache.conversation import ConversationEviction
from firstlight.cache.eviction import EvictionPolicy
from firstlight.cache.ranked import GdsfEviction, LfuEviction, LruEviction
from firstlight.cache.s3fifo import S3FifoEviction

__all__ = ["make_policy"]


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """A new policy for a pool of so many blocks; `name` is one of `eviction.POLICIES`."""
    if name == "lru":
        return LruEviction()
    if name == "lfu":
        return LfuEviction(num_blocks)
    if name == "s3fifo":
        return S3FifoEviction(num_blocks)
    if name == "gdsf":
        return GdsfEviction(num_blocks)
    return ConversationEviction(num_blocks)
