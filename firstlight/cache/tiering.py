"""Moves blocks between the pool and the tiers below it. Knows block ids, chains and predicted seconds.

One thread (the core's) calls it. Blocks that are on their way down or up are held here, as by a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from firstlight.cache.pool import BlockPool
from firstlight.cache.prefix import PrefixChain, PrefixIndex
from firstlight.cache.tiers import BlockBytes, Load, Tiers

__all__ = ["LoadOffer", "LoadTicket", "Tiering"]

WATERMARK = 0.8
"""From this share of used or cached blocks on, blocks are moved down ahead of need."""
SPILLS_AT_ONCE = 32
SETTLE_POLL_S = 5e-5
CLOSE_S = 20.0
"""How long an orderly end may take to write what is cached."""


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """Blocks `first`.. of a chain that tiers have, and the seconds that loading them is predicted to take."""

    first: int
    num_blocks: int
    predicted_s: float


@dataclass(slots=True)
class LoadTicket:
    """A load while it runs. `num_loaded` is final once `is_done`."""

    chain: PrefixChain
    first: int
    hits: list[int]
    """The blocks before those that are loaded, held so that room for these is not made of them."""
    blocks: list[int]
    load: Load
    is_done: bool = False
    num_loaded: int = 0


class Tiering:
    """Spills evicted blocks, and brings them back when asked.

    Args:
        reserve: blocks that one step can take; as many are kept without a key from the watermark on.
    """

    def __init__(self, pool: BlockPool, index: PrefixIndex, tiers: Tiers, source: BlockBytes, reserve: int) -> None:
        self.tiers = tiers
        self._pool = pool
        self._index = index
        self._source = source
        self._reserve = min(reserve, int((1 - WATERMARK) * pool.num_blocks))
        self._spilling: set[int] = set()
        self._tickets: list[LoadTicket] = []
        self._loading: dict[bytes, LoadTicket] = {}
        self.num_evicted_ahead = 0
        """Blocks that were moved down, or forgotten here because they are below already, before a step needed them."""

    # -- down -----------------------------------------------------------------------------------------------------

    def spill(self, block: int) -> None:
        """Copies a block that is about to be used again, in the caller's thread: the reserve was not enough."""
        record = self._index.record(block)
        if self._index.is_full(block) and self.tiers.where(record.key) is None:
            record.payload = self._source.read_blocks([block])
            self.tiers.put(record, None)

    def spill_ahead(self) -> None:
        """Has the blocks that would be evicted next read by the other thread, until a step's worth is free of keys.

        Below the watermark it does nothing. Cost: some 10 microseconds per block.
        """
        pool = self._pool
        self._take_read()
        used = pool.num_blocks - pool.num_empty
        if used < WATERMARK * pool.num_blocks:
            return
        while pool.num_empty + len(self._spilling) < self._reserve and len(self._spilling) < SPILLS_AT_ONCE:
            victim = pool.next_victim()
            if victim is None:
                return
            block = victim
            record = self._index.record(block)
            is_below = self.tiers.where(record.key) is not None or not self._index.is_full(block)
            pool.lock([block])
            self._index.evicted(block, record.key)
            pool.forget(block)
            self.num_evicted_ahead += 1
            if is_below:
                pool.release([block])
                continue
            self._spilling.add(block)
            self.tiers.put(record, block)

    def _take_read(self) -> None:
        for block in self.tiers.take_read():
            self._spilling.discard(block)
            self._pool.release([block])

    def settle(self) -> bool:
        """Waits for blocks that are being read down, because somebody needs one now; False where none is."""
        had_any = bool(self._spilling)
        while self._spilling:
            self._take_read()
            time.sleep(SETTLE_POLL_S)
        return had_any

    # -- up -------------------------------------------------------------------------------------------------------

    def loading(self, key: bytes) -> LoadTicket | None:
        """The load that brings the block with this key, if one does."""
        return self._loading.get(key)

    @property
    def is_loading(self) -> bool:
        return bool(self._tickets)

    def offer(self, chain: PrefixChain, first: int) -> LoadOffer | None:
        """What the tiers have of the chain from block `first` on, as an unbroken run. Cost: O(blocks)."""
        num = {"host": 0, "disk": 0}
        for key in chain.keys[first:]:
            where = self.tiers.where(key)
            if where is None or key in self._loading or self._pool.find(key) is not None:
                break
            num[where] += 1
        total = sum(num.values())
        return LoadOffer(first, total, self.tiers.predict_s(num["host"], num["disk"])) if total else None

    def start(self, chain: PrefixChain, hits: list[int], offer: LoadOffer) -> LoadTicket | None:
        """Begins to load what was offered behind the cached blocks `hits`; None where the pool has no room for it."""
        self._pool.lock(hits)
        blocks = self._pool.allocate(offer.num_blocks)
        if blocks is None:
            self._pool.release(reversed(hits))
            return None
        span = slice(offer.first, offer.first + offer.num_blocks)
        keys = chain.keys[span]
        load = Load(keys, chain.contents[span], [self.tiers.hosted(key) for key in keys])
        ticket = LoadTicket(chain, offer.first, hits, blocks, load)
        self._tickets.append(ticket)
        self._loading.update(dict.fromkeys(keys, ticket))
        self.tiers.start(load)
        return ticket

    def collect(self) -> None:
        """Puts what has been read into its blocks and makes them findable. Call it between two steps."""
        for ticket in [one for one in self._tickets if one.load.is_read]:
            for at, (block, payload) in enumerate(zip(ticket.blocks, ticket.load.payloads, strict=False)):
                self._source.write_blocks([block], payload)
                self._index.insert(ticket.chain, ticket.first + at, block, ticket.load.origins[at])
            ticket.num_loaded = len(ticket.load.payloads)
            self._end(ticket)

    def cancel(self) -> bool:
        """Gives up every load, for a request that nothing else can make room for; False where none runs."""
        had_any = bool(self._tickets)
        for ticket in list(self._tickets):
            ticket.load.is_cancelled = True
            self._end(ticket)
        return had_any

    def _end(self, ticket: LoadTicket) -> None:
        ticket.is_done = True
        self._tickets.remove(ticket)
        for key in ticket.load.keys:
            del self._loading[key]
        self._pool.release(reversed(ticket.hits + ticket.blocks))

    # -- all ------------------------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Blocks that are held here."""
        return len({block for table in self.tables() for block in table})

    def tables(self) -> Iterator[list[int]]:
        """The blocks that are held here, for audits."""
        yield list(self._spilling)
        for ticket in self._tickets:
            yield ticket.hits + ticket.blocks

    def close(self, *, keep: bool) -> None:
        """Ends the tiers' thread; with `keep`, after every cached block has gone to disk, where there is one.

        Beginnings go last, so that they are what a full disk keeps. Takes at most CLOSE_S.
        """
        give_up_s = time.monotonic() + CLOSE_S
        if keep and self.tiers.has_disk:
            self.tiers.empty_host(give_up_s)
            for block in reversed(self._index.cached_blocks()):
                if not self.tiers.wait_for_disk(give_up_s):
                    break
                self.spill(block)
        self.tiers.close()
