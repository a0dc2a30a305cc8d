"""The background audit: while nothing is open, blocks that were hit are computed again and compared to the bit.

Knows cache and backend. Runs on the core's thread, between requests.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable

from firstlight.backend.base import Backend
from firstlight.cache import KVCache
from firstlight.types import StepPlan, StepRow

__all__ = ["Auditor"]

log = logging.getLogger(__name__)

QUIET_S = 1.0
"""Nothing has been open for so long before an audit: the next turn of a conversation often comes at once."""


class Auditor:
    """Recomputes one block at a time on top of the cached ones before it, so that a wrong block is found by itself.

    Args:
        share: of idle time that audits may take; 0: none.
    """

    def __init__(
        self, backend: Backend, cache: KVCache, share: float, max_step_tokens: int, clock: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._share = share
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._not_before_s = 0.0

    def wait_s(self, idle_since_s: float) -> float | None:
        """Seconds until the next audit is due; None while there is nothing to audit."""
        if self._share <= 0 or not self._cache.audits:
            return None
        return max(0.0, max(self._not_before_s, idle_since_s + QUIET_S) - self._clock())

    def audit(self) -> None:
        """Recomputes one sampled block and compares. A wrong one is dropped with all that was computed on top of it.

        Raises:
            BackendError: the backend failed.
        """
        begin_s = self._clock()
        self._audit_one()
        self._not_before_s = self._clock() + (self._clock() - begin_s) / self._share

    def _audit_one(self) -> None:
        cache = self._cache
        chain, i = cache.audits.take()
        blocks = cache.sampled(chain, i)
        if blocks is None:
            return
        cache.pool.lock(blocks)
        scratch = cache.pool.allocate(1)
        if scratch is not None:
            is_equal = self._recomputed(list(array("I", chain.contents[i])), blocks[:i], scratch[0], blocks[i])
            cache.pool.release(scratch)
        cache.pool.release(reversed(blocks))
        if scratch is None:
            return
        cache.audits.num_done += 1
        if not is_equal:
            cache.audits.num_wrong += 1
            origin, key = cache.origin(blocks[i]), chain.keys[i].hex()[:16]
            dropped = cache.drop(blocks[i])
            log.error(
                "cache_audit_mismatch block=%d key=%s first_token=%d origin=%r dropped_blocks=%d time=%.0f",
                *(blocks[i], key, i * cache.block_size, origin, dropped, time.time()),
            )

    def _recomputed(self, token_ids: list[int], before: list[int], scratch: int, block: int) -> bool:
        """Whether computing the tokens behind `before` into `scratch` gives the bytes of `block`."""
        size = self._cache.block_size
        for at in range(0, size, self._max_step_tokens):
            row = StepRow(
                request_id="audit",
                token_ids=token_ids[at : at + self._max_step_tokens],
                start=len(before) * size + at,
                block_table=[*before, scratch],
            )
            self._backend.run(StepPlan(step_id=0, rows=[row]))
        return self._backend.read_blocks([scratch]) == self._backend.read_blocks([block])
