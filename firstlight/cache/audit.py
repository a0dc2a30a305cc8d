"""Which hits a background audit recomputes. Knows chains and counts, nothing of how a block is recomputed."""

from __future__ import annotations

import random
from collections import deque

from firstlight.cache.prefix import PrefixChain

__all__ = ["AuditSamples"]

MAX_SAMPLES = 64
"""Hits that wait for their audit; the oldest are forgotten."""


class AuditSamples:
    """One random block of each hit, the latest first to be audited. Written by the core's thread."""

    def __init__(self) -> None:
        self.num_done = 0
        """Blocks that were computed again and compared."""
        self.num_wrong = 0
        """... and were not equal to the bit."""
        self._samples: deque[tuple[PrefixChain, int]] = deque(maxlen=MAX_SAMPLES)
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, chain: PrefixChain, num_hits: int) -> None:
        """Notes that the chain's first `num_hits` blocks were a hit."""
        self._samples.append((chain, self._random.randrange(num_hits)))

    def take(self) -> tuple[PrefixChain, int]:
        """A chain and which of its blocks to audit; there is one."""
        return self._samples.pop()
