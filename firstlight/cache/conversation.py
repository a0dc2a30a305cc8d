"""Keeps what the policy keeps that would have had the most hits lately: learned reuse, or one of the classic rivals.

Each rival runs on keys alone, in a shadow pool of the real one's size, over the same requests. No rival wins
everywhere: learned reuse does where conversations return, recency where sessions hurry. Knows keys, no tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from firstlight.cache.eviction import EvictionPolicy
from firstlight.cache.pool import BlockPool
from firstlight.cache.ranked import GdsfEviction, LfuEviction, LruEviction
from firstlight.cache.reuse import ReuseEviction
from firstlight.cache.s3fifo import S3FifoEviction

__all__ = ["ConversationEviction"]

MEMORY = 0.9995
"""Weight of a hit against one of the next request: about the last 2,000 requests count."""
LEAD = 1.01
"""A rival takes over when it has so many times the hits: changing what is kept costs hits too."""


class _Shadow:
    """What one policy would keep: a pool of keys, driven by the requests that come and go."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy, on_evict: Callable[[bytes], None]) -> None:
        self.score = 0.0
        self.pool = BlockPool(num_blocks, 1, policy)
        self.pool.on_evict = lambda block, key: on_evict(key)
        self._tables: dict[str, list[int]] = {}

    def arrive(self, owner: str, keys: Sequence[bytes]) -> None:
        """Looks the request's blocks up, counts the unbroken leading run of hits, and takes in the others."""
        pool = self.pool
        blocks: list[int] = []
        for key in keys:
            block = pool.find(key)
            if block is None:
                break
            blocks.append(block)
        self.score = self.score * MEMORY + len(blocks)
        pool.policy.arrived(owner, keys)
        pool.lock(blocks)
        self._tables[owner] = blocks
        self._extend(blocks, keys)

    def _extend(self, blocks: list[int], keys: Sequence[bytes]) -> None:
        """Takes in the blocks behind those that the request holds; none of them where they do not fit beside others."""
        first = len(blocks)
        for i, block in enumerate(self.pool.allocate(len(keys) - first) or (), first):
            self.pool.name(block, keys[i], keys[i - 1] if i else None)
            blocks.append(block)

    def finish(self, owner: str, keys: Sequence[bytes]) -> None:
        """Takes in what the request has published beyond its prompt, and lets go of its blocks."""
        blocks = self._tables.pop(owner, None)
        if blocks is None:
            return
        if 0 < len(blocks) < len(keys):
            self._extend(blocks, keys)
        self.pool.policy.finished(owner, keys)
        self.pool.release(reversed(blocks))


class ConversationEviction:
    """Evicts what the leading shadow does not keep. Cost: the rivals' own, about 10 microseconds a block."""

    def __init__(self, num_blocks: int) -> None:
        rivals: tuple[EvictionPolicy, ...] = (
            ReuseEviction(num_blocks),
            LruEviction(),
            S3FifoEviction(num_blocks),
            LfuEviction(num_blocks),
            GdsfEviction(num_blocks),
        )
        self._shadows = [_Shadow(num_blocks, policy, self._watcher(i)) for i, policy in enumerate(rivals)]
        self._leader = 0
        self._keys: list[bytes] = [b""] * num_blocks
        self._offered: OrderedDict[bytes, int] = OrderedDict()
        """Blocks on offer by key, the longest offered first."""
        self._unkept: deque[bytes] = deque()
        """Keys on offer that the leader does not keep; some may have changed since."""

    def _watcher(self, rival: int) -> Callable[[bytes], None]:
        def evicted(key: bytes) -> None:
            if rival == self._leader and key in self._offered:
                self._unkept.append(key)

        return evicted

    def arrived(self, owner: str, keys: Sequence[bytes]) -> None:
        for shadow in self._shadows:
            shadow.arrive(owner, keys)
        scores = [shadow.score for shadow in self._shadows]
        best = max(scores)
        if best > LEAD * scores[self._leader]:
            self._leader = scores.index(best)
            kept = self._shadows[self._leader].pool
            self._unkept = deque(key for key in self._offered if kept.find(key) is None)

    def finished(self, owner: str, keys: Sequence[bytes]) -> None:
        for shadow in self._shadows:
            shadow.finish(owner, keys)

    def used(self, block: int, key: bytes) -> None:
        self._keys[block] = key

    def freed(self, block: int) -> None:
        """The shadows know when each request ended."""

    def offered(self, block: int) -> None:
        key = self._keys[block]
        self._offered[key] = block
        if self._shadows[self._leader].pool.find(key) is None:
            self._unkept.append(key)

    def withdrawn(self, block: int) -> None:
        del self._offered[self._keys[block]]

    def victim(self) -> int:
        kept = self._shadows[self._leader].pool
        while self._unkept:
            key = self._unkept.popleft()
            if key in self._offered and kept.find(key) is None:
                return self._offered[key]
        return next(iter(self._offered.values()))
