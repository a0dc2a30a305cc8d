"""The prefix index: full blocks found by what they and everything before them contain.

Knows token ids, salts and weights' fingerprints; not which requests exist.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from firstlight.cache.pool import BlockPool
from firstlight.cache.tiers.record import BlockRecord
from firstlight.types import CacheMiss

__all__ = ["PrefixChain", "PrefixIndex"]

KEY_BYTES = 32
"""BLAKE2b-256: salts keep tenants apart, so a collision must cost an attacker 2^128 work."""
MAX_GHOSTS = 16_384
"""Keys of evicted blocks that are remembered, to tell "evicted" from "never computed"."""
MAX_SIBLINGS = 64
"""Blocks that a missing one is compared with at most."""
TOKEN_BYTES = 4
_NO_CHILDREN: dict[int, None] = {}


@dataclass(frozen=True, slots=True)
class _Declared:
    """The beginnings that the operator declared for all tenants: their root, and their full blocks' contents."""

    root: bytes = b""
    prefixes: tuple[tuple[bytes, ...], ...] = ()


NOTHING_DECLARED = _Declared()


class PrefixChain:
    """The keys of one request's full blocks, computed as far as they were asked for.

    Key i covers blocks 0..i: it hashes parent i with the tokens of block i. Parent i is key i - 1, except that the
    tenant's salt goes in before the first block that no declared prefix has: everything from there on is its own.
    """

    __slots__ = ("_block_size", "_matching", "_salt", "_shared_root", "contents", "keys", "parents", "root")

    def __init__(self, root: bytes, block_size: int, salt: bytes = b"", declared: _Declared = NOTHING_DECLARED) -> None:
        self.root = root
        self._block_size = block_size
        self._salt = salt
        self._shared_root = declared.root
        self._matching = list(declared.prefixes)
        self.keys: list[bytes] = []
        self.parents: list[bytes] = []
        self.contents: list[bytes] = []

    def extend(self, tokens: list[int], num_blocks: int) -> None:
        """Makes keys up to block `num_blocks` - 1 exist; `tokens` only ever grows. Cost: O(new blocks)."""
        size = self._block_size
        for i in range(len(self.keys), num_blocks):
            content = array("I", tokens[i * size : (i + 1) * size]).tobytes()
            parent = self._parent(i, content)
            self.parents.append(parent)
            self.keys.append(hashlib.blake2b(parent + content, digest_size=KEY_BYTES).digest())
            self.contents.append(content)

    def _parent(self, i: int, content: bytes) -> bytes:
        if not self._matching:
            return self.keys[-1] if i else self.root
        self._matching = [one for one in self._matching if i < len(one) and one[i] == content]
        if i == 0:
            return self._shared_root if self._matching else self.root
        return self.keys[-1] if self._matching else self._salted()

    def rest_parent(self) -> bytes:
        """What tokens behind the last key stand on that do not fill a block: they are no declared prefix's."""
        if not self.keys:
            return self.root
        return self._salted() if self._matching else self.keys[-1]

    def _salted(self) -> bytes:
        if not self._salt:
            return self.keys[-1]
        return hashlib.blake2b(self.keys[-1] + self._salt, digest_size=KEY_BYTES, person=b"tenant").digest()


class PrefixIndex:
    """Finds computed blocks by chain, and knows which blocks are being computed right now, and by whom.

    A hit compares tokens too, so that equal hashes of different tokens are a miss, not a wrong answer.

    Args:
        declared: prompts' beginnings whose blocks all tenants share.
    """

    def __init__(self, pool: BlockPool, fingerprint: bytes, declared: Iterable[Sequence[int]] = ()) -> None:
        self._pool = pool
        self._fingerprint = fingerprint
        self._declared = _Declared(self._root(b""), tuple(self._blocks_of(prefix) for prefix in declared))
        self._contents: list[bytes] = [b""] * pool.num_blocks
        self._parents: list[bytes] = [b""] * pool.num_blocks
        self._before: list[bytes] = [b""] * pool.num_blocks
        """Per block the key of the one it was computed on top of; empty for a first one."""
        self._origins: list[str] = [""] * pool.num_blocks
        self._children: dict[bytes, dict[int, None]] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._claims: dict[bytes, str] = {}

    def _blocks_of(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        size = self._pool.block_size
        return tuple(array("I", tokens[i : i + size]).tobytes() for i in range(0, len(tokens) - size + 1, size))

    def chain(self, salt: bytes) -> PrefixChain:
        """An empty chain for one request. Equal fingerprint and salt share blocks; others only declared ones."""
        return PrefixChain(self._root(salt), self._pool.block_size, salt, self._declared)

    def _root(self, salt: bytes) -> bytes:
        parts = len(self._fingerprint).to_bytes(8, "little") + self._fingerprint + salt
        return hashlib.blake2b(parts, digest_size=KEY_BYTES).digest()

    def match(self, chain: PrefixChain, max_blocks: int) -> list[int]:
        """The longest run of computed blocks from the start, at most `max_blocks`. Locks and mutates nothing."""
        found: list[int] = []
        for key, content in zip(chain.keys[:max_blocks], chain.contents, strict=False):
            block = self._pool.find(key)
            if block is None or self._contents[block] != content:
                break
            found.append(block)
        return found

    def miss(self, chain: PrefixChain, num_hits: int) -> CacheMiss | None:
        """Why block `num_hits` of the chain was no hit; None where the chain has no such block.

        Cost: O(siblings), at most MAX_SIBLINGS blocks are compared.
        """
        if num_hits >= len(chain.keys):
            return None
        first = num_hits * self._pool.block_size
        if chain.keys[num_hits] in self._ghosts:
            return CacheMiss(first_token=first, reason="evicted")
        source, equal = self._nearest(chain.parents[num_hits], chain.contents[num_hits])
        if source is None:
            return CacheMiss(first_token=first, reason="not_cached")
        return CacheMiss(first_token=first + equal, reason="diverged")

    def nearest(self, chain: PrefixChain, i: int, tokens: list[int]) -> tuple[int | None, int]:
        """The cached block that begins most like `tokens`, which stand where block i does; and how many are equal."""
        parent = chain.parents[i] if i < len(chain.parents) else chain.rest_parent()
        return self._nearest(parent, array("I", tokens).tobytes())

    def _nearest(self, parent: bytes, content: bytes) -> tuple[int | None, int]:
        best, most = None, -1
        for block in islice(reversed(self._children.get(parent, _NO_CHILDREN)), MAX_SIBLINGS):
            equal = _num_equal(content, self._contents[block])
            if equal > most:
                best, most = block, equal
        return best, most

    def insert(self, chain: PrefixChain, i: int, block: int, origin: str) -> None:
        """Makes `block` findable as the i-th of the chain, unless an equal one is; drops the claim on it.

        Args:
            origin: who computed it, or which tier it came from: for the log, should it ever be found wrong.
        """
        key, parent = chain.keys[i], chain.parents[i]
        if self._pool.name(block, key, chain.keys[i - 1] if i else None):
            self._contents[block], self._parents[block] = chain.contents[i], parent
            self._before[block], self._origins[block] = chain.keys[i - 1] if i else b"", origin
            self._children.setdefault(parent, {})[block] = None
            self._ghosts.pop(key, None)
        self._claims.pop(key, None)

    def insert_rest(self, chain: PrefixChain, tokens: list[int], block: int, origin: str) -> None:
        """Makes a block that is not full findable by `nearest`: `tokens` are those behind the chain's full blocks."""
        content = array("I", tokens).tobytes()
        parent = chain.rest_parent()
        key = hashlib.blake2b(parent + content, digest_size=KEY_BYTES, person=b"rest").digest()
        if self._pool.name(block, key, chain.keys[-1] if chain.keys else None):
            self._contents[block], self._parents[block] = content, parent
            self._before[block], self._origins[block] = chain.keys[-1] if chain.keys else b"", origin
            self._children.setdefault(parent, {})[block] = None

    def evicted(self, block: int, key: bytes) -> None:
        """Forgets what the block held; call it before the pool takes its key away."""
        siblings = self._children[self._parents[block]]
        del siblings[block]
        if not siblings:
            del self._children[self._parents[block]]
        if self.is_full(block):
            self._ghosts[key] = None
        if len(self._ghosts) > MAX_GHOSTS:
            self._ghosts.popitem(last=False)

    def is_full(self, block: int) -> bool:
        """The block with a key is one that a chain finds; others are found as the nearest only."""
        return len(self._contents[block]) == self._pool.block_size * TOKEN_BYTES

    def record(self, block: int) -> BlockRecord:
        """What a block with a key holds, its KV bytes aside."""
        key = self._pool.key(block)
        assert key is not None
        return BlockRecord(key, self._before[block], self._contents[block])

    def origin(self, block: int) -> str:
        """Where the block's bytes came from."""
        return self._origins[block]

    def cached_blocks(self) -> list[int]:
        """Every block with a key, each after the one it stands on. Cost: O(cached blocks)."""
        return list(self._standing_on(b""))

    def descendants(self, key: bytes) -> list[int]:
        """Blocks that were computed on top of the block with this key, nearest first. Cost: O(blocks)."""
        return list(self._standing_on(key))

    def _standing_on(self, key: bytes) -> Iterator[int]:
        above: dict[bytes, list[int]] = {}
        for siblings in self._children.values():
            for block in siblings:
                above.setdefault(self._before[block], []).append(block)
        queue = [key]
        for one in queue:
            for block in above.get(one, ()):
                yield block
                queue.append(self._pool.key(block) or b"")

    def claim(self, keys: list[bytes], owner: str) -> None:
        """Notes that `owner` is computing the blocks with these keys; the first claim on a key stands."""
        for key in keys:
            self._claims.setdefault(key, owner)

    def unclaim(self, keys: list[bytes], owner: str) -> None:
        """Drops what is left of `owner`'s claims on these keys."""
        for key in keys:
            if self._claims.get(key) == owner:
                del self._claims[key]

    def claimant(self, key: bytes) -> str | None:
        """Who is computing the block with this key, if anyone."""
        return self._claims.get(key)

    def check(self, owners: set[str]) -> None:
        """Audits the claims: each belongs to a request that is computing; and the tree. Raises AssertionError."""
        stale = set(self._claims.values()) - owners
        assert not stale, f"claims of requests that compute nothing: {sorted(stale)}"
        listed = [block for siblings in self._children.values() for block in siblings]
        assert len(listed) == self._pool.num_cached, f"{len(listed)} blocks in the tree, {self._pool.num_cached} named"
        assert all(self._pool.key(block) is not None for block in listed), "a block without a key is in the tree"


def _num_equal(one: bytes, other: bytes) -> int:
    """Leading tokens that two blocks' contents have in common."""
    if one == other:
        return len(one) // TOKEN_BYTES
    most = min(len(one), len(other)) // TOKEN_BYTES
    for num in range(most):
        span = slice(num * TOKEN_BYTES, (num + 1) * TOKEN_BYTES)
        if one[span] != other[span]:
            return num
    return most
