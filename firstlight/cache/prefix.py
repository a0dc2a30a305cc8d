"""The prefix index: full blocks found by what they and everything before them contain.

Knows token ids, salts and weights' fingerprints; not which requests exist.
"""

from __future__ import annotations

import hashlib
from array import array

from firstlight.cache.pool import BlockPool

__all__ = ["PrefixChain", "PrefixIndex"]

KEY_BYTES = 32
"""BLAKE2b-256: salts keep tenants apart, so a collision must cost an attacker 2^128 work."""


class PrefixChain:
    """The keys of one request's full blocks, computed as far as they were asked for.

    Key i covers blocks 0..i: it hashes key i - 1 with the tokens of block i; key -1 hashes fingerprint and salt.
    """

    __slots__ = ("_block_size", "_root", "contents", "keys")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []

    def extend(self, tokens: list[int], num_blocks: int) -> None:
        """Makes keys up to block `num_blocks` - 1 exist; `tokens` only ever grows. Cost: O(new blocks)."""
        size = self._block_size
        for i in range(len(self.keys), num_blocks):
            content = array("I", tokens[i * size : (i + 1) * size]).tobytes()
            parent = self.keys[-1] if self.keys else self._root
            self.keys.append(hashlib.blake2b(parent + content, digest_size=KEY_BYTES).digest())
            self.contents.append(content)


class PrefixIndex:
    """Finds computed blocks by chain, and knows which blocks are being computed right now, and by whom.

    A hit compares tokens too, so that equal hashes of different tokens are a miss, not a wrong answer.
    """

    def __init__(self, pool: BlockPool, fingerprint: bytes) -> None:
        self._pool = pool
        self._fingerprint = fingerprint
        self._contents: list[bytes] = [b""] * pool.num_blocks
        self._claims: dict[bytes, str] = {}

    def chain(self, salt: bytes) -> PrefixChain:
        """An empty chain for one request. Equal fingerprint and salt share blocks, others never do."""
        parts = len(self._fingerprint).to_bytes(8, "little") + self._fingerprint + salt
        return PrefixChain(hashlib.blake2b(parts, digest_size=KEY_BYTES).digest(), self._pool.block_size)

    def match(self, chain: PrefixChain, max_blocks: int) -> list[int]:
        """The longest run of computed blocks from the start, at most `max_blocks`. Locks and mutates nothing."""
        found: list[int] = []
        for key, content in zip(chain.keys[:max_blocks], chain.contents, strict=False):
            block = self._pool.find(key)
            if block is None or self._contents[block] != content:
                break
            found.append(block)
        return found

    def insert(self, chain: PrefixChain, i: int, block: int) -> None:
        """Makes `block` findable as the i-th of the chain, unless an equal one is; drops the claim on it."""
        if self._pool.name(block, chain.keys[i]):
            self._contents[block] = chain.contents[i]
        self._claims.pop(chain.keys[i], None)

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
        """Audits the claims: each belongs to a request that is computing. Raises AssertionError."""
        stale = set(self._claims.values()) - owners
        assert not stale, f"claims of requests that compute nothing: {sorted(stale)}"
