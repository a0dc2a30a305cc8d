"""How much KV memory a request will need before it ends, and who gives way when there is too little.

Knows blocks, lengths and computed work; not the order of the queue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from firstlight.cache import KVCache
from firstlight.scheduler.lengths import OutputLengths
from firstlight.scheduler.limits import SchedulerLimits
from firstlight.scheduler.state import RequestState

__all__ = ["Admission"]

CAUTION_STEP = 0.25
CAUTION_MEMORY = 0.95
"""Each preemption moves what is set aside CAUTION_STEP of the way to `max_tokens`; each answer that ends takes 5 % of
that back. This is the cooldown: after a preemption fewer requests run until some have ended."""


class Admission:
    """Sets blocks aside for predicted output, so that running requests seldom meet an empty pool.

    Without `limits.reserve_output`, blocks are set aside only for tokens that are known.
    """

    def __init__(self, cache: KVCache, limits: SchedulerLimits) -> None:
        self.lengths = OutputLengths()
        self.caution = 0.0
        self._cache = cache
        self._limits = limits
        self._refused: tuple[str, int, int, float] | None = None

    def expected_output(self, state: RequestState) -> int:
        """Output tokens this request will have in the end, as far as can be told now."""
        if state.expected_output <= state.num_output:
            key = (state.request.tenant, state.request.route)
            state.expected_output = self.lengths.expect(key, state.num_output, state.max_tokens)
        return state.expected_output

    def was_refused(self, state: RequestState, hits: list[int]) -> bool:
        """Whether `fits` said no to this before and nothing has made room since. Until a block is given back, running
        requests can only come to need more; so most steps are spared a walk over them all."""
        return self._refused == self._question(state, hits)

    def _question(self, state: RequestState, hits: list[int]) -> tuple[str, int, int, float]:
        return state.id, len(hits), self._cache.pool.num_freed, self.caution

    def fits(
        self, state: RequestState, hits: list[int], prefills: Iterable[RequestState], decodes: Collection[RequestState]
    ) -> bool:
        """Whether the request can run to its predicted end beside the others, each to its own."""
        cache = self._cache
        needed = cache.num_needed(hits, self._final_tokens(state))
        for other in (*prefills, *decodes):
            needed += max(0, cache.num_blocks_for(self._final_tokens(other)) - len(other.table.blocks))
        if not self._limits.reserve_output:
            needed += len(decodes)
        if needed <= cache.num_free:
            return True
        self._refused = self._question(state, hits)
        return False

    def _final_tokens(self, state: RequestState) -> int:
        if not self._limits.reserve_output:
            return len(state.tokens) + (state.gap > 1)
        expected = self.expected_output(state)
        return state.num_prompt + expected + round(self.caution * (state.max_tokens - expected))

    def ended(self, state: RequestState) -> None:
        """Learns from an answer that is complete."""
        self.lengths.observe((state.request.tenant, state.request.route), state.num_output)
        self.caution *= CAUTION_MEMORY

    def victim(self, running: Collection[RequestState]) -> RequestState:
        """Who gives way: of the least urgent class the one whose computing again costs least (ties: the youngest).

        Blocks that others hold too are found again in the prefix index, so they are no loss.
        """
        self.caution = min(1.0, self.caution + CAUTION_STEP)
        if self._limits.preempt == "last-in":
            return max(running, key=lambda s: (s.request.priority, s.rank[3]))
        return min(running, key=lambda s: (-s.request.priority, self._lost_tokens(s), -s.rank[3]))

    def _lost_tokens(self, state: RequestState) -> int:
        shared = sum(self._cache.pool.refs(block) > 1 for block in state.table.blocks)
        return max(0, state.num_computed - shared * self._cache.block_size)
