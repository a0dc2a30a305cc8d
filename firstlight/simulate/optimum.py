"""The most hits any policy could have had: Belady's rule, which reads the rest of the trace. For comparison only."""

from __future__ import annotations

import heapq

from firstlight.simulate.hits import HitCount
from firstlight.simulate.trace import Trace

__all__ = ["replay_optimum"]

NEVER = 1 << 60


def replay_optimum(trace: Trace, cache_blocks: int) -> HitCount:
    """Evicts the block that is needed again last, of equals the one deepest in its prefix.

    Source: Belady, "A study of replacement algorithms" (1966). Every block of a request is taken in, as
    computing it needs them all; so this is the most that is possible, up to broken prefixes.
    """
    uses: list[list[int]] = [[] for _ in range(trace.num_block_ids)]
    for at in range(len(trace.requests) - 1, -1, -1):
        for block in trace.requests[at].blocks:
            uses[block].append(at)
    cached: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for request in trace.requests:
        fits = len(request.blocks) <= cache_blocks
        is_run = fits
        for block in request.blocks:
            uses[block].pop()
            is_run = is_run and block in cached
            hits += is_run
        mine = set(request.blocks) if fits else set()
        for depth, block in enumerate(request.blocks):
            if block not in cached:
                if not fits:
                    continue
                if len(cached) == cache_blocks:
                    _evict(cached, heap, mine)
            rank = (-(uses[block][-1] if uses[block] else NEVER), -depth)
            cached[block] = rank
            heapq.heappush(heap, (*rank, block))
    return HitCount(hits, trace.num_blocks)


def _evict(cached: dict[int, tuple[int, int]], heap: list[tuple[int, int, int]], mine: set[int]) -> None:
    """Drops the block needed last that the request at hand does not hold."""
    held = []
    while True:
        use, depth, block = heapq.heappop(heap)
        if cached.get(block) != (use, depth):
            continue
        if block not in mine:
            del cached[block]
            break
        held.append((use, depth, block))
    for entry in held:
        heapq.heappush(heap, entry)
