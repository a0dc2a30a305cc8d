"""Which of several rivals has lately had the most hits; a new one leads only on evidence beyond chance.

Hits come in lumps, a long prompt at a time: at small capacities a dozen requests make a difference of 20 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Leader"]

MEMORY = 0.95
FORGET_EVERY = 100
"""Requests after which what was seen weighs MEMORY times as much: about the last 2,000 count."""


class Leader:
    """Scores every rival against the leader from when it was last behind. Cost: O(rivals) a request.

    Source: Page, "Continuous inspection schemes" (1954): what a rival lost before it began to gain does not hold it
    back. The bound is ours: the spread of the gains seen, since nobody knows beforehand how large they are.

    Args:
        deviations: by rival, by how many standard deviations of a fair game's score it has to be ahead to lead.
    """

    def __init__(self, deviations: Sequence[float]) -> None:
        self.index = 0
        """Who leads; the first one does at first."""
        self._deviations = list(deviations)
        self._ahead = [0.0] * len(deviations)
        """By rival, the sum of its hits less the leader's, since that was last below 0."""
        self._squares = [0.0] * len(deviations)
        self._num_requests = 0

    def score(self, hits: Sequence[int]) -> bool:
        """Counts what each rival found of one request; whether another one leads now, against whom all start anew."""
        self._num_requests += 1
        if self._num_requests % FORGET_EVERY == 0:
            self._ahead = [MEMORY * x for x in self._ahead]
            self._squares = [MEMORY * x for x in self._squares]
        for i, mine in enumerate(hits):
            gain = mine - hits[self.index]
            if self._ahead[i] + gain > 0:
                self._ahead[i] += gain
                self._squares[i] += gain * gain
            else:
                self._ahead[i] = self._squares[i] = 0.0
        surely = [self._surplus(i) for i in range(len(hits))]
        best = surely.index(max(surely))
        if surely[best] <= 0:
            return False
        self.index = best
        self._ahead = [0.0] * len(hits)
        self._squares = [0.0] * len(hits)
        return True

    def _surplus(self, rival: int) -> float:
        """How far it is ahead of the leader beyond what chance would explain."""
        return self._ahead[rival] - self._deviations[rival] * math.sqrt(self._squares[rival])
