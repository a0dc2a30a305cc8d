"""How many prefix blocks a cache of so many blocks finds, when requests come and go one at a time in order of arrival.

This is what an eviction policy alone decides: no hardware, no batch, no queue is in it. The cache is the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from firstlight.cache import BlockTable, KVCache, make_policy
from firstlight.simulate.trace import Trace

__all__ = ["HitCount", "replay_blocks"]

END = 0xFFFF_FFFF
"""A token behind every prompt: the cache leaves the last one to compute."""


@dataclass(frozen=True, slots=True)
class HitCount:
    """Prefix blocks found (the unbroken leading run of each request) and asked for."""

    hits: int
    blocks: int

    @property
    def rate(self) -> float:
        """The share found, 0..1."""
        return self.hits / self.blocks if self.blocks else 0.0


def replay_blocks(trace: Trace, policy: str, cache_blocks: int, num_replicas: int = 1) -> HitCount:
    """The hits of `num_replicas` caches of `cache_blocks` blocks each; a request goes where most of it is cached.

    A request longer than a cache finds nothing and leaves nothing.
    """
    caches = [KVCache(cache_blocks, 1, b"trace", policy=make_policy(policy, cache_blocks)) for _ in range(num_replicas)]
    order = _in_turns(num_replicas)
    hits = 0
    for request in trace.requests:
        if len(request.blocks) > cache_blocks:
            continue
        tokens = [*request.blocks, END]
        places: list[tuple[KVCache, BlockTable, list[int]]] = []
        for i in next(order):
            table = caches[i].table("request", b"")
            places.append((caches[i], table, caches[i].peek(table, tokens)))
        cache, table, found = max(places, key=lambda place: len(place[2]))
        hits += len(found)
        cache.adopt(table, tokens, found)
        cache.grow(table, len(tokens) - 1)
        cache.publish(table, tokens, len(tokens) - 1)
        cache.release(table)
    return HitCount(hits, trace.num_blocks)


def _in_turns(num: int) -> Iterator[list[int]]:
    """Every order that begins one further on: of equal caches, each is the first in turn."""
    first = 0
    while True:
        yield [(first + i) % num for i in range(num)]
        first += 1
