"""The shape of what is cached: which blocks nothing continues, so that leaves go before what they stand on.

Knows keys and their parents; not why a block is kept.
"""

from __future__ import annotations

from firstlight.cache.eviction import EvictionPolicy

__all__ = ["CachedTree"]


class CachedTree:
    """Blocks with a key, held or free. Offers the free ones without cached children to the policy.

    Invariants:
        A block is on offer exactly when it is free and no block with a key has it for parent.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._parents: list[bytes | None] = [None] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._num_children: dict[bytes, int] = {}
        self._by_key: dict[bytes, int] = {}
        self._offered: set[int] = set()
        self._inner: dict[int, None] = {}
        """Free blocks that are not on offer, the longest freed first."""

    def add(self, block: int, key: bytes, parent: bytes | None) -> None:
        """A held block got its key; `parent` is the key of the block before it in its prompt."""
        self._keys[block], self._parents[block], self._by_key[key] = key, parent, block
        if parent is not None:
            num = self._num_children[parent] = self._num_children.get(parent, 0) + 1
            before = self._by_key.get(parent) if num == 1 else None
            if before in self._offered:
                self._withdraw(before)
                self._inner[before] = None
        self.policy.used(block, key)

    def lock(self, block: int, *, was_free: bool) -> None:
        """One more request uses the block."""
        key = self._keys[block]
        assert key is not None
        if was_free:
            self._take(block)
        self.policy.used(block, key)

    def free(self, block: int) -> None:
        """Nobody holds the block any more."""
        key = self._keys[block]
        assert key is not None
        self.policy.freed(block)
        if key in self._num_children:
            self._inner[block] = None
        else:
            self._offered.add(block)
            self.policy.offered(block)

    def remove(self, block: int, *, is_free: bool) -> None:
        """The block loses its key; the one before it may be a leaf now."""
        key, parent = self._keys[block], self._parents[block]
        assert key is not None
        if is_free:
            self._take(block)
        self._keys[block] = self._parents[block] = None
        del self._by_key[key]
        if parent is None:
            return
        self._num_children[parent] -= 1
        if self._num_children[parent]:
            return
        del self._num_children[parent]
        before = self._by_key.get(parent)
        if before in self._inner:
            del self._inner[before]
            self._offered.add(before)
            self.policy.offered(before)

    def victim(self) -> int:
        """The block to evict. Without a leaf that is free (its copy is held by a request that computed it at the same
        time), the deepest free block."""
        return self.policy.victim() if self._offered else next(iter(self._inner))

    def _take(self, block: int) -> None:
        if block in self._inner:
            del self._inner[block]
        else:
            self._withdraw(block)

    def _withdraw(self, block: int) -> None:
        self._offered.remove(block)
        self.policy.withdrawn(block)

    def check(self, free: set[int]) -> None:
        """Audits offers and children against the blocks that are free and carry a key. Raises AssertionError."""
        assert free == self._offered | set(self._inner), "free blocks with a key and the tree disagree"
        assert not self._offered & set(self._inner), "a block is on offer and not"
        parents = [parent for parent in self._parents if parent is not None]
        assert len(parents) == sum(self._num_children.values()), "the tree counts children wrong"
        for block in self._offered:
            assert self._keys[block] not in self._num_children, f"block {block} is on offer and continued"
