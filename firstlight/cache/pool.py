"""The pool of KV blocks: reference counts, a free list, and the keys by which freed blocks are found again.

Knows block ids and keys; not what a key stands for, nor who holds a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from firstlight.cache.eviction import EvictionPolicy
from firstlight.cache.ranked import LruEviction
from firstlight.cache.tree import CachedTree

__all__ = ["BlockPool"]


class BlockPool:
    """Hands out fixed-size blocks. A freed block keeps its key, and can be found by it, until it is reused.

    Invariants:
        A block is in the free list exactly when its reference count is 0.
        `find(key) == b` exactly when block b carries that key; at most one block carries a key.
    """

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy | None = None) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self.num_freed = 0
        """How often a block's last reference was dropped."""
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Told of a block and its key just before the key is dropped to use the block again."""
        self.policy: EvictionPolicy = policy or LruEviction()
        self._tree = CachedTree(num_blocks, self.policy)
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._num_free_named = 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with a key included."""
        return len(self._free)

    @property
    def num_empty(self) -> int:
        """Free blocks without a key: they can be used without an eviction."""
        return len(self._free) - self._num_free_named

    @property
    def num_cached(self) -> int:
        """Blocks that carry a key, held or free."""
        return len(self._by_key)

    def refs(self, block: int) -> int:
        """How many tables hold the block."""
        return self._refs[block]

    def key(self, block: int) -> bytes | None:
        """The key the block carries, if any."""
        return self._keys[block]

    def find(self, key: bytes) -> int | None:
        """The block that carries `key`, held or free."""
        return self._by_key.get(key)

    def allocate(self, num: int) -> list[int] | None:
        """Takes `num` blocks with one reference each, or answers None and takes nothing.

        Mutates: a reused block loses its key (an eviction).
        """
        if num > len(self._free):
            return None
        taken = []
        for _ in range(num):
            block = next(iter(self._free))
            if self._keys[block] is not None:
                block = self._evict()
            del self._free[block]
            self._refs[block] = 1
            taken.append(block)
        return taken

    def next_victim(self) -> int | None:
        """The free block that would be evicted next, once no free one is without a key; None without any."""
        return self._tree.victim() if self._num_free_named else None

    def _evict(self) -> int:
        """Drops the key of the free block that the policy chooses; no free block is without one."""
        block = self._tree.victim()
        key = self._keys[block]
        assert key is not None
        if self.on_evict is not None:
            self.on_evict(block, key)
        self.forget(block)
        self.num_evictions += 1
        return block

    def forget(self, block: int) -> None:
        """Takes the block's key away; a free one is then the first to be used."""
        key, self._keys[block] = self._keys[block], None
        if key is None:
            return
        del self._by_key[key]
        self._tree.remove(block, is_free=self._refs[block] == 0)
        if block in self._free:
            self._num_free_named -= 1
            self._free.move_to_end(block, last=False)

    def lock(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each block; a free one leaves the free list and keeps its key."""
        for block in blocks:
            was_free = self._refs[block] == 0
            if was_free:
                del self._free[block]
                self._num_free_named -= self._keys[block] is not None
            self._refs[block] += 1
            if self._keys[block] is not None:
                self._tree.lock(block, was_free=was_free)

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one reference from each; a block that falls to 0 becomes free, in the order given.

        A block without a key can never be hit, so it goes to the front of the free list.
        """
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} released while nobody holds it"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self.num_freed += 1
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self._num_free_named += 1
                    self._tree.free(block)

    def name(self, block: int, key: bytes, parent: bytes | None = None) -> bool:
        """Gives a held block its key; False, and nothing changes, if another block carries it already.

        Args:
            parent: key of the block before it in its prompt; a parent is evicted after what continues it.
        """
        assert self._refs[block] > 0
        assert self._keys[block] is None
        if key in self._by_key:
            return False
        self._keys[block] = key
        self._by_key[key] = block
        self._tree.add(block, key, parent)
        return True

    def check(self, tables: Iterable[list[int]]) -> None:
        """Audits the pool against every table that holds blocks of it. Raises AssertionError saying what is broken."""
        held = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                held[block] += 1
        for block, refs in enumerate(self._refs):
            assert refs == held[block], f"block {block} counts {refs} references, tables hold {held[block]}"
            assert (refs == 0) == (block in self._free), f"block {block} with {refs} references: free list disagrees"
            key = self._keys[block]
            assert key is None or self._by_key.get(key) == block, f"block {block} is not found by its own key"
        is_named = [self._keys[block] is not None for block in self._free]
        assert is_named == sorted(is_named), "a free block with a key stands before one without"
        assert sum(is_named) == self._num_free_named, "free blocks with a key are counted wrong"
        self._tree.check({block for block in self._free if self._keys[block] is not None})
        named = sum(key is not None for key in self._keys)
        assert named == len(self._by_key), f"{named} blocks carry a key, {len(self._by_key)} keys are found"
