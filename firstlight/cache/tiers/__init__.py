"""Places below KV memory for evicted blocks: host memory, then a directory. Knows keys and bytes, no requests."""

from firstlight.cache.tiers.disk import DiskTier
from firstlight.cache.tiers.record import BlockRecord, CorruptBlockError, ForeignBlockError
from firstlight.cache.tiers.store import BlockBytes, Load, TierCounts, Tiers

__all__ = [
    "BlockBytes",
    "BlockRecord",
    "CorruptBlockError",
    "DiskTier",
    "ForeignBlockError",
    "Load",
    "TierCounts",
    "Tiers",
]
