"""How long answers get, learned per class of request. Knows counts of tokens and opaque class keys."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["OutputLengths"]

EDGES: list[int] = [1, 2, 3] + [size for k in range(2, 20) for size in (1 << k, 3 << (k - 1))]
"""Upper ends of the histogram's buckets, at most a factor of 1.5 apart."""
QUANTILE = 0.8
"""Four answers in five end within what is set aside for them."""
PRIOR_TOKENS = 256
PRIOR_WEIGHT = 4.0
"""Before any answer of a class has ended, as if so many had ended at PRIOR_TOKENS."""
MEMORY = 0.98
"""Weight of an old answer against the next of its class: about the last 50 count."""
MIN_TAIL = 0.5
"""With less than this weight beyond where an answer already is, nothing is known: it may run to its limit."""
MAX_CLASSES = 1024


class OutputLengths:
    """A fading histogram of output lengths per class (such as API key and route)."""

    def __init__(self) -> None:
        self._classes: OrderedDict[Hashable, list[float]] = OrderedDict()

    def observe(self, key: Hashable, num_output: int) -> None:
        """An answer of this class ended, by itself or at its limit, after `num_output` tokens."""
        weights = [MEMORY * weight for weight in self._weights(key)]
        weights[_bucket(num_output)] += 1
        self._classes[key] = weights
        self._classes.move_to_end(key)
        if len(self._classes) > MAX_CLASSES:
            self._classes.popitem(last=False)

    def expect(self, key: Hashable, num_output: int, max_tokens: int) -> int:
        """Output tokens to set aside in all for an answer that has `num_output` already and may reach `max_tokens`.

        The QUANTILE among past answers that were longer than this one is now; what outlives them all gets `max_tokens`.
        """
        weights = self._weights(key)
        first = _bucket(num_output + 1)
        tail = sum(weights[first:])
        if tail < MIN_TAIL:
            return max_tokens
        seen = 0.0
        for edge, weight in zip(EDGES[first:], weights[first:], strict=True):
            seen += weight
            if seen >= QUANTILE * tail:
                return min(max_tokens, max(edge, num_output + 1))
        return max_tokens

    def _weights(self, key: Hashable) -> list[float]:
        known = self._classes.get(key)
        if known is not None:
            return known
        weights = [0.0] * len(EDGES)
        weights[_bucket(PRIOR_TOKENS)] = PRIOR_WEIGHT
        return weights


def _bucket(num: int) -> int:
    return min(bisect.bisect_left(EDGES, num), len(EDGES) - 1)
