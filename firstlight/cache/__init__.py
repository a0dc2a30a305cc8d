"""Who owns which KV block: pool, block tables, prefix index, eviction. Knows block ids and token ids, no tensors."""

from firstlight.cache.eviction import EvictionPolicy, LruEviction
from firstlight.cache.kv import BlockTable, CacheStats, KVCache
from firstlight.cache.pool import BlockPool
from firstlight.cache.prefix import PrefixChain, PrefixIndex

__all__ = [
    "BlockPool",
    "BlockTable",
    "CacheStats",
    "EvictionPolicy",
    "KVCache",
    "LruEviction",
    "PrefixChain",
    "PrefixIndex",
]
