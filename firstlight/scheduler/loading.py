"""When a waiting request's prefix is loaded from a tier instead of computed. Knows predicted seconds and blocks."""

from __future__ import annotations

from firstlight.cache import KVCache
from firstlight.scheduler.state import RequestState
from firstlight.scheduler.steptime import StepTimeModel

__all__ = ["Loading"]

MAX_LOADS = 3
"""Per admission: whoever's blocks are gone again each time they have been loaded computes them."""


class Loading:
    """Starts loads for requests that are about to be admitted, and has them wait for what is under way."""

    def __init__(self, cache: KVCache, step_time: StepTimeModel) -> None:
        self._cache = cache
        self._step_time = step_time

    def awaits(self, state: RequestState, *, has_room: bool) -> bool:
        """True while blocks that this request needs next are being loaded. May begin to load them.

        Args:
            has_room: the request could be admitted now, so that what is loaded will be used at once.
        """
        tiering = self._cache.tiering
        if tiering is None or state.table.chain is None:
            return False
        if state.is_loading:
            return True
        if len(state.tickets) >= MAX_LOADS or not has_room:
            return False
        hits = self._cache.peek(state.table, state.tokens)
        first = len(hits)
        key = self._cache.first_missing_key(state.table, first)
        if key is None:
            return False
        ticket = tiering.loading(key)
        if ticket is None:
            offer = tiering.offer(state.table.chain, first)
            size = self._cache.block_size
            if offer is None or offer.predicted_s >= self._step_time.prefill_s(first * size, offer.num_blocks * size):
                return False
            ticket = tiering.start(state.table.chain, hits, offer)
        if ticket is None:
            return False
        state.tickets.append(ticket)
        return True

    def collect(self) -> None:
        """Takes in what has been loaded since the last step."""
        if self._cache.tiering is not None:
            self._cache.tiering.collect()

    @property
    def is_loading(self) -> bool:
        """Something is under way."""
        return self._cache.tiering is not None and self._cache.tiering.is_loading

    def settle(self) -> bool:
        """Waits for blocks that are free but for being copied; False where none is."""
        return self._cache.tiering is not None and self._cache.tiering.settle()

    def cancel(self) -> bool:
        """Gives up what is under way; False where nothing is."""
        return self._cache.tiering is not None and self._cache.tiering.cancel()
