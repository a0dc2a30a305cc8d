"""Who owns which KV block: pool, block tables, prefix index, eviction. Knows block ids and token ids, no tensors."""

from firstlight.cache.eviction import POLICIES, EvictionPolicy
from firstlight.cache.kv import BlockTable, CacheStats, KVCache
from firstlight.cache.policies import make_policy
from firstlight.cache.pool import BlockPool
from firstlight.cache.prefix import PrefixChain, PrefixIndex
from firstlight.cache.tiering import LoadTicket

__all__ = [
    "POLICIES",
    "BlockPool",
    "BlockTable",
    "CacheStats",
    "EvictionPolicy",
    "KVCache",
    "LoadTicket",
    "PrefixChain",
    "PrefixIndex",
    "make_policy",
]
