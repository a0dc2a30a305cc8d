"""How long a step will take on this machine, learned from the steps it ran.

Knows counts and seconds, not requests. t = a + b * rows + c * tokens + d * attended, every coefficient >= 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["StepLoad", "StepTimeModel", "attended_tokens"]

SCALES = (1.0, 1 / 16, 1 / 256, 1 / 65536)
"""Bring the four features of a usual step near 1, so that one covariance suits all."""
PRIOR_S = (1e-3, 2e-4, 5e-4, 2e-7)
"""Coefficients before any step was seen: a small model on a few cores. The first step scales them all."""
PRIOR_VARIANCE = 30.0
"""Variance of each coefficient before any step, as a multiple of its own square: wrong by five times is no surprise."""
FORGETTING = 0.98
"""Weight of an old step against the next one of the same kind: about the last 50 count."""
MAX_RELATIVE_ERROR = 0.3
"""An error beyond this share of the step counts as this much: a descheduled core is not a slower machine."""
MAX_CHUNK = 2**31
NUM_SETTLED = 64
LEARN_EVERY = 4
"""After NUM_SETTLED steps, one in so many decode steps is learned from: the others say the same, and learning takes as
long as planning (80 microseconds in a server whose caches the kernels have just swept)."""
NUM_TRUSTING = 16
"""For this many first steps an error may be as large as the step: the prior is a guess."""
SURPRISE_MEMORY = 0.8
MAX_SURPRISE = 0.6
"""Share of errors beyond MAX_RELATIVE_ERROR, fading by SURPRISE_MEMORY a step, at which the model starts over: five in
a row do it, every second step does not. The machine has changed, or the steps it began with were misleading."""


def attended_tokens(start: int, num: int) -> int:
    """Query-key pairs of `num` tokens that stand at `start`: each attends to all before it and itself."""
    return num * start + num * (num + 1) // 2


@dataclass(slots=True)
class StepLoad:
    """What a step computes: rows, tokens, and query-key pairs over all rows."""

    rows: int = 0
    tokens: int = 0
    attended: int = 0

    def add(self, start: int, num: int) -> None:
        """Counts one more row of `num` tokens at position `start`."""
        self.rows += 1
        self.tokens += num
        self.attended += attended_tokens(start, num)


class StepTimeModel:
    """Recursive least squares on relative error, forgetting only in the direction just observed.

    A long run of decode steps therefore does not wash out what prefill costs. Coefficients are clamped at 0.
    Source: directional forgetting after Cao and Schwartz, Automatica 36 (2000); the clamp and the error bound are ours.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._theta = [c / s for c, s in zip(PRIOR_S, SCALES, strict=True)]
        self._num_skipped = 0
        self._surprise: float
        self._cov: list[list[float]]
        self._inf: list[list[float]]
        self._start_over(1.0)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """a, b, c, d in seconds, per step, row, token and query-key pair."""
        a, b, c, d = (t * s for t, s in zip(self._theta, SCALES, strict=True))
        return a, b, c, d

    def predict_s(self, load: StepLoad) -> float:
        """Seconds a step of this load will take."""
        a, b, c, d = self.coefficients
        return a + b * load.rows + c * load.tokens + d * load.attended

    def max_chunk(self, load: StepLoad, start: int, budget_s: float) -> int:
        """The most tokens one more row at `start` may have for the step to end inside `budget_s`; 0 if none."""
        _, b, c, d = self.coefficients
        left = budget_s - self.predict_s(load) - b
        linear = c + d * (start + 0.5)
        if left <= 0:
            return 0
        # the larger root of d/2 n^2 + linear n = left, in the form that stays exact as d goes to 0
        below = math.sqrt(linear * linear + 2 * d * left) + linear
        return int(min(2 * left / below, MAX_CHUNK)) if below > 0 else MAX_CHUNK

    def observe(self, load: StepLoad, run_s: float) -> None:
        """Learns from one step that took `run_s` seconds, or finds that it has nothing to teach."""
        if run_s <= 0:
            return
        if self.num_observed >= NUM_SETTLED and load.tokens == load.rows:
            self._num_skipped = (self._num_skipped + 1) % LEARN_EVERY
            if self._num_skipped:
                return
        if self.num_observed == 0 or self._surprise > MAX_SURPRISE:
            self._start_over(run_s / self.predict_s(load))
        self.num_observed += 1
        s = SCALES
        x = (s[0] / run_s, load.rows * s[1] / run_s, load.tokens * s[2] / run_s, load.attended * s[3] / run_s)
        self._forget(x)
        px = [sum(map(float.__mul__, row, x)) for row in self._cov]
        gain = 1 / (1 + sum(map(float.__mul__, px, x)))
        error = 1 - sum(map(float.__mul__, self._theta, x))
        is_surprise = abs(error) > MAX_RELATIVE_ERROR
        self._surprise = SURPRISE_MEMORY * self._surprise + (1 - SURPRISE_MEMORY) * is_surprise
        bound = 1.0 if self.num_observed <= NUM_TRUSTING else MAX_RELATIVE_ERROR
        error = max(-bound, min(bound, error))
        for i in range(4):
            self._theta[i] = max(0.0, self._theta[i] + px[i] * gain * error)
            for j in range(4):
                self._cov[i][j] -= px[i] * px[j] * gain
                self._inf[i][j] += x[i] * x[j]

    def _start_over(self, factor: float) -> None:
        """Takes the coefficients, `factor` times as large, for a first guess about an unknown machine."""
        self._surprise = 0.0
        self._theta = [factor * max(t, 1e-3 * p / s) for t, p, s in zip(self._theta, PRIOR_S, SCALES, strict=True)]
        variances = [PRIOR_VARIANCE * t * t for t in self._theta]
        self._cov = [[variances[i] * (i == j) for j in range(4)] for i in range(4)]
        self._inf = [[(i == j) / variances[i] for j in range(4)] for i in range(4)]

    def _forget(self, x: tuple[float, float, float, float]) -> None:
        """Widens the covariance along `x` alone, as if what was known about such steps counted FORGETTING times."""
        rx = [sum(map(float.__mul__, row, x)) for row in self._inf]
        xrx = sum(map(float.__mul__, rx, x))
        if xrx < 1e-12:
            return
        shrink = (1 - FORGETTING) / xrx
        widen = (1 - FORGETTING) / (FORGETTING * xrx)
        for i in range(4):
            for j in range(4):
                self._inf[i][j] -= shrink * rx[i] * rx[j]
                self._cov[i][j] += widen * x[i] * x[j]
