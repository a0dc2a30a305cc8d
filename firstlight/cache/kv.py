"""One request's view of the cache: adopt a cached prefix, grow, publish what was computed, give back.

Knows block ids and token ids; decides nothing: when the pool is full it says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from firstlight.cache.audit import AuditSamples
from firstlight.cache.eviction import EvictionPolicy
from firstlight.cache.pins import Pins
from firstlight.cache.pool import BlockPool
from firstlight.cache.prefix import PrefixChain, PrefixIndex
from firstlight.cache.tiering import Tiering
from firstlight.cache.tiers import BlockBytes, TierCounts, Tiers
from firstlight.types import CacheMiss

__all__ = ["BlockTable", "CacheStats", "KVCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Gauges and counters of the cache. Lookups and hits count admissions; tokens count what they asked and got."""

    num_blocks: int
    free_blocks: int
    cached_blocks: int
    lookups: int
    hits: int
    lookup_tokens: int
    hit_tokens: int
    evictions: int
    hit_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    """Where the tokens that were found were: "device", "host", "disk". Those brought back from a tier count there."""
    evictions_by_reason: dict[str, int] = field(default_factory=dict)
    """Cached blocks that lost their place: "room" (a request needed it, as in `evictions`), "ahead" (moved to a tier
    before one did), "audit" (found wrong, or computed on top of such a block)."""
    pinned_blocks: int = 0
    pins_yielded: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    tiers: dict[str, TierCounts] = field(default_factory=dict)
    audits: int = 0
    audit_mismatches: int = 0


class BlockTable:
    """The blocks of one request, in order. Written by KVCache alone; `blocks` is passed to the backend by reference."""

    __slots__ = ("blocks", "chain", "claimed", "num_published", "owner")

    def __init__(self, owner: str, chain: PrefixChain | None) -> None:
        self.owner = owner
        self.chain = chain
        self.blocks: list[int] = []
        self.claimed: list[bytes] = []
        self.num_published = 0
        """Leading blocks that were adopted or offered to the index already."""


class KVCache:
    """Pool and prefix index together, as the scheduler uses them.

    Args:
        fingerprint: names weights and KV layout; equal fingerprints may share blocks.
        prefix_cache: False keeps every block private.
        max_pinned: blocks that pins may hold.
        declared: prompts' beginnings whose blocks all tenants share.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fingerprint: bytes,
        *,
        prefix_cache: bool = True,
        policy: EvictionPolicy | None = None,
        max_pinned: int = 0,
        declared: Iterable[Sequence[int]] = (),
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, policy)
        self.block_size = block_size
        self._index = PrefixIndex(self.pool, fingerprint, declared) if prefix_cache else None
        self._pins = Pins(self.pool, max_pinned)
        self.tiering: Tiering | None = None
        self.audits = AuditSamples()
        self.pool.on_evict = self._evicted
        self._lookups = self._hits = self._lookup_tokens = self._hit_tokens = self._num_wrong = 0

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `grow` could take now."""
        return self.pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, owner: str, salt: bytes, *, is_shared: bool = True) -> BlockTable:
        """An empty table for one request. One that is not shared neither takes cached blocks nor offers its own."""
        return BlockTable(owner, self._index.chain(salt) if self._index and is_shared else None)

    def peek(self, table: BlockTable, tokens: list[int]) -> list[int]:
        """The cached blocks that `adopt` would give: full blocks only, never so many that no token is left to compute.

        Mutates: extends the table's chain. Cost: O(blocks of `tokens`), hashing each block once in a request's life.
        """
        if self._index is None or table.chain is None:
            return []
        most = (len(tokens) - 1) // self.block_size
        table.chain.extend(tokens, most)
        return self._index.match(table.chain, most)

    def awaits(self, table: BlockTable) -> None:
        """Tells the policy that a waiting request will use the blocks of its prompt (after `peek`), until `adopt` or
        `release`."""
        if table.chain is not None:
            self.pool.policy.awaited(table.owner, table.chain.keys)

    def num_needed(self, hits: list[int], num_tokens: int) -> int:
        """How many free blocks it takes to hold `num_tokens` tokens on top of `hits` (free hits count as taken)."""
        return self.num_blocks_for(num_tokens) - sum(self.pool.refs(block) > 0 for block in hits)

    def first_missing_key(self, table: BlockTable, num_hits: int) -> bytes | None:
        """The key of the first full block behind `num_hits` hits (after `peek`); None if there is none."""
        if table.chain is None or num_hits >= len(table.chain.keys):
            return None
        return table.chain.keys[num_hits]

    def miss(self, table: BlockTable, num_hits: int) -> CacheMiss | None:
        """Why the block behind `num_hits` hits was none (after `peek`); None where nothing is shared or missing."""
        if self._index is None or table.chain is None:
            return None
        return self._index.miss(table.chain, num_hits)

    def claimant(self, key: bytes) -> str | None:
        """The request that is computing the block with this key, if any."""
        return self._index.claimant(key) if self._index is not None else None

    def adopt(self, table: BlockTable, tokens: list[int], hits: list[int]) -> int:
        """Locks `hits` (from `peek`) into an empty table, claims the full blocks of `tokens` it will compute.

        Returns: how many leading tokens need no computing.
        """
        assert not table.blocks
        cached = len(hits) * self.block_size
        self._lookups += 1
        self._hits += bool(hits)
        self._lookup_tokens += len(tokens)
        self._hit_tokens += cached
        if self._index is not None and table.chain is not None:
            self.pool.policy.arrived(table.owner, table.chain.keys)
        if hits and table.chain is not None:
            self.audits.add(table.chain, len(hits))
        self.pool.lock(hits)
        table.blocks = list(hits)
        table.num_published = len(hits)
        if self._index is not None and table.chain is not None:
            table.claimed = table.chain.keys[len(hits) :]
            self._index.claim(table.claimed, table.owner)
        return cached

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes the table hold `num_tokens` tokens; False, and nothing changes, when the pool is short."""
        missing = self.num_blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return True
        taken = self.pool.allocate(missing)
        if taken is None:
            return False
        table.blocks.extend(taken)
        return True

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Gives back blocks beyond those that hold `num_tokens` tokens (rejected drafts)."""
        keep = self.num_blocks_for(num_tokens)
        if keep < len(table.blocks):
            self.pool.release(reversed(table.blocks[keep:]))
            del table.blocks[keep:]

    def publish(self, table: BlockTable, tokens: list[int], num_computed: int) -> None:
        """Offers newly full blocks to other requests; call with computed and verified tokens only."""
        full = num_computed // self.block_size
        if full <= table.num_published:
            return
        if self._index is not None and table.chain is not None:
            table.chain.extend(tokens, full)
            for i in range(table.num_published, full):
                self._index.insert(table.chain, i, table.blocks[i], table.owner)
        table.num_published = full

    def adopt_rest(self, table: BlockTable, tokens: list[int]) -> tuple[int, tuple[int, int]] | None:
        """After `adopt`: the cached block that begins most like the first one to be computed, and one to copy it to.

        Returns: how many more tokens need no computing, and (source, destination) of the copy that must run before the
        next row; None where nothing would be gained.
        """
        if self._index is None or table.chain is None:
            return None
        i, size = len(table.blocks), self.block_size
        rest = tokens[i * size : min((i + 1) * size, len(tokens) - 1)]
        source, num_equal = self._index.nearest(table.chain, i, rest)
        if source is None or num_equal <= 0 or not self.grow(table, i * size + num_equal):
            return None
        self._hit_tokens += num_equal
        return num_equal, (source, table.blocks[i])

    def publish_rest(self, table: BlockTable, tokens: list[int], num_computed: int) -> None:
        """Offers the last block of a request that ends, though it is not full, for others to copy; after `publish`."""
        full = num_computed // self.block_size
        rest = tokens[full * self.block_size : num_computed]
        if self._index is None or table.chain is None or not rest or len(table.chain.keys) != full:
            return
        block = table.blocks[full]
        if self.pool.key(block) is None:
            self._index.insert_rest(table.chain, rest, block, table.owner)

    def release(self, table: BlockTable) -> None:
        """Gives every block back, the last first, so that a shared beginning outlives its branches. Drops claims."""
        if table.chain is not None:
            self.pool.policy.finished(table.owner, table.chain.keys[: table.num_published])
        self.pool.release(reversed(table.blocks))
        table.blocks = []
        table.num_published = 0
        if self._index is not None:
            self._index.unclaim(table.claimed, table.owner)
            table.claimed = []

    # -- pins -----------------------------------------------------------------------------------------------------

    @property
    def num_pinned(self) -> int:
        """Blocks that pins hold."""
        return self._pins.num_blocks

    def pin(self, table: BlockTable, num_tokens: int, until_s: float, tenant: bytes = b"") -> int:
        """Keeps the published full blocks of the table's first `num_tokens` tokens from eviction until then.

        Returns: tokens pinned, fewer where the quota, or the tenant's share of it, is full.
        """
        if self._index is None or table.chain is None:
            return 0
        blocks = self._index.match(table.chain, min(num_tokens // self.block_size, table.num_published))
        return self._pins.add(blocks, until_s, tenant) * self.block_size

    def expire_pins(self, now_s: float) -> None:
        """Gives back pinned blocks whose time is over."""
        if self._pins.first_end_s <= now_s:
            self._pins.expire(now_s)

    def give_up_pin(self) -> bool:
        """Ends the pins that would end first, for a request that nothing else can make room for; False without any."""
        return self._pins.give_up()

    # -- looking on -----------------------------------------------------------------------------------------------

    def owners(self) -> bytes:
        """One byte per block: 0 free, 1 free but found by its key, 2 held by requests, 3 pinned. Any thread."""
        pool = self.pool
        owners = bytearray(2 if pool.refs(b) else pool.key(b) is not None for b in range(pool.num_blocks))
        for block in self._pins.table():
            owners[block] = 3
        return bytes(owners)

    # -- tiers ----------------------------------------------------------------------------------------------------

    def attach(self, tiers: Tiers, source: BlockBytes, reserve: int) -> None:
        """Has evicted blocks kept in `tiers`; `reserve`: blocks that one step can take."""
        assert self._index is not None, "tiers need the prefix cache"
        self.tiering = Tiering(self.pool, self._index, tiers, source, reserve)

    def _evicted(self, block: int, key: bytes) -> None:
        if self.tiering is not None:
            self.tiering.spill(block)
        if self._index is not None:
            self._index.evicted(block, key)

    def spill_ahead(self) -> None:
        """From the watermark on, moves down what would be evicted next, beside the steps. Call it between two."""
        if self.tiering is not None:
            self.tiering.spill_ahead()

    @property
    def num_moving(self) -> int:
        """Blocks on their way to or from a tier."""
        return self.tiering.num_held if self.tiering is not None else 0

    def close(self, *, keep: bool = True) -> None:
        """Ends the tiers' thread, with `keep` after what is cached has gone to the disk tier. Idempotent."""
        if self.tiering is not None:
            self.tiering.close(keep=keep)
            self.tiering = None

    # -- audit ----------------------------------------------------------------------------------------------------

    def sampled(self, chain: PrefixChain, i: int) -> list[int] | None:
        """The blocks 0..i of a chain that was hit, if all are still cached."""
        assert self._index is not None
        blocks = self._index.match(chain, i + 1)
        return blocks if len(blocks) == i + 1 else None

    def origin(self, block: int) -> str:
        """Where a cached block's bytes came from."""
        assert self._index is not None
        return self._index.origin(block)

    def drop(self, block: int) -> int:
        """Forgets a wrong block and everything computed on top of it, in every tier.

        Returns: how many blocks of the pool that were.
        """
        assert self._index is not None
        key = self.pool.key(block)
        assert key is not None
        blocks = [block, *self._index.descendants(key)]
        keys = [self.pool.key(one) or b"" for one in blocks]
        for one, own in zip(blocks, keys, strict=True):
            self._pins.forget(one)
            self._index.evicted(one, own)
            self.pool.forget(one)
        if self.tiering is not None:
            self.tiering.tiers.remove(keys)
        self._num_wrong += len(blocks)
        return len(blocks)

    def stats(self) -> CacheStats:
        """Counters as of now; may be called from any thread."""
        tiers = self.tiering.tiers if self.tiering is not None else None
        loaded = {name: counts.loaded * self.block_size for name, counts in tiers.counts.items()} if tiers else {}
        return CacheStats(
            num_blocks=self.pool.num_blocks,
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            lookups=self._lookups,
            hits=self._hits,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            evictions=self.pool.num_evictions,
            hit_tokens_by_tier={"device": max(0, self._hit_tokens - sum(loaded.values()))} | loaded,
            evictions_by_reason={
                "room": self.pool.num_evictions,
                "ahead": self.tiering.num_evicted_ahead if self.tiering is not None else 0,
                "audit": self._num_wrong,
            },
            pinned_blocks=self._pins.num_blocks,
            pins_yielded=self._pins.num_yielded,
            host_blocks=tiers.num_host if tiers else 0,
            disk_blocks=tiers.num_disk if tiers else 0,
            tiers={name: replace(counts) for name, counts in tiers.counts.items()} if tiers else {},
            audits=self.audits.num_done,
            audit_mismatches=self.audits.num_wrong,
        )

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Audits pool, tables and claims; `tables` is every table that exists. Raises AssertionError."""
        tables = list(tables)
        moving = self.tiering.tables() if self.tiering is not None else ()
        self.pool.check([*(table.blocks for table in tables), self._pins.table(), *moving])
        assert self._pins.num_blocks <= self._pins.max_blocks, "more blocks are pinned than the quota allows"
        if self._index is not None:
            self._index.check({table.owner for table in tables if table.claimed})
        for table in tables:
            assert table.num_published <= len(table.blocks), f"{table.owner}: published more blocks than it holds"
