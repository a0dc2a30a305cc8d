"""How long a step will take on this machine, learned from the steps it ran.

Knows counts and seconds, not requests. t = step + row * rows + token * tokens + context * context + pair * attended,
every coefficient >= 0. `context` is KV read (once per row, whatever the row computes), `attended` is arithmetic on it:
one long context costs a stream several times what a token of a prefill chunk pays for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Coefficients", "StepLoad", "StepTimeModel", "attended_tokens"]

SCALES = (1.0, 1 / 16, 1 / 256, 1 / 4096, 1 / 65536)
"""Bring the features of a usual step near 1, so that one covariance suits all."""
PRIOR_S = (1e-3, 2e-4, 5e-4, 5e-7, 2e-7)
"""Coefficients before any step was seen: a small model on a few cores. The first step scales them all."""
NUM = len(SCALES)
PAIRS = [(i, j) for i in range(NUM) for j in range(i, NUM)]
SWEEPS = 8
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
PACE_STEP, PACE_RETURN, MAX_PACE_ERROR = 0.15, 0.02, 0.3
"""The pace (how much slower than fitted the machine is just now) follows the last ten steps or so, each error counting
at most MAX_PACE_ERROR; PACE_RETURN of it a step is left to the coefficients. A neighbour that comes and goes changes
the pace and leaves what the parts of a step cost, relative to each other, as it was."""
OVERRUN_QUANTILE = 0.95
OVERRUN_PACE = 0.04
MAX_OVERRUN = 0.08
"""What is more is noise, or will soon be in the pace; a margin of 25 % made prompts wait and no gap shorter."""
ERROR_PACE = 0.02


def attended_tokens(start: int, num: int) -> int:
    """Query-key pairs of `num` tokens that stand at `start`: each attends to all before it and itself."""
    return num * start + num * (num + 1) // 2


class Coefficients(NamedTuple):
    """Seconds per step, per row, per token computed, per token of context read, per query-key pair."""

    step_s: float
    row_s: float
    token_s: float
    context_s: float
    pair_s: float


@dataclass(slots=True)
class StepLoad:
    """What a step computes: rows, tokens, tokens of context its rows read, and query-key pairs over all rows."""

    rows: int = 0
    tokens: int = 0
    context: int = 0
    attended: int = 0

    def add(self, start: int, num: int) -> None:
        """Counts one more row of `num` tokens at position `start`."""
        self.rows += 1
        self.tokens += num
        self.context += start + num
        self.attended += attended_tokens(start, num)


class StepTimeModel:
    """Non-negative least squares on relative error, over sums that fade by the kind of step.

    Steps of one kind (number of tokens and context, by powers of two) push out only older steps of their kind, so a
    long run of decode steps does not wash out what prefill costs. Relative error makes a slow outlier weigh little.

    Args:
        learn_every: once settled, one step in so many is learned from (of decode steps LEARN_EVERY times fewer).
    """

    def __init__(self, *, learn_every: int = 1) -> None:
        self.num_observed = 0
        self.num_fits = 0
        """How often the fit, the pace aside, has changed."""
        self._learn_every = learn_every
        self._overruns = [0.0, 0.0]
        self.mean_error = 0.0
        """Mean of |real - predicted| / predicted over about the last 50 steps."""
        self._theta = [c / s for c, s in zip(PRIOR_S, SCALES, strict=True)]
        self._num_skipped = 0
        self._pace = 0.0
        self._pace_factor = 1.0
        self._coefficients: Coefficients
        self._kinds: dict[tuple[int, int], list[float]]
        self._sums: list[float]
        self._start_over(1.0)

    @property
    def coefficients(self) -> Coefficients:
        """What each part of a step costs, as far as known."""
        return self._coefficients

    @property
    def overrun(self) -> float:
        """How much longer than predicted steps with prefill take than decode steps do, inside 0..MAX_OVERRUN.

        Of each kind one step in twenty exceeds its prediction by more than what is compared. What decode steps exceed
        theirs by is the machine's noise: it is there without prefill, and filling steps less would not take it away.
        """
        decode, prefill = self._overruns
        return max(0.0, min(MAX_OVERRUN, prefill - decode))

    def predict_s(self, load: StepLoad) -> float:
        """Seconds a step of this load will take."""
        c = self.coefficients
        fixed = c.step_s + c.row_s * load.rows + c.token_s * load.tokens
        return fixed + c.context_s * load.context + c.pair_s * load.attended

    def fitted_s(self, load: StepLoad) -> float:
        """Seconds a step of this load takes at the machine's usual pace."""
        return self.predict_s(load) / self._pace_factor

    def prefill_s(self, start: int, num: int) -> float:
        """Seconds that `num` prompt tokens at `start` add to the steps that compute them, the steps' own cost aside."""
        c = self.coefficients
        return c.token_s * num + c.pair_s * attended_tokens(start, num)

    def max_chunk(self, load: StepLoad, start: int, budget_s: float) -> int:
        """The most tokens one more row at `start` may have for the step to end inside `budget_s`; 0 if none."""
        c = self.coefficients
        left = budget_s - self.predict_s(load) - c.row_s - c.context_s * start
        linear = c.token_s + c.context_s + c.pair_s * (start + 0.5)
        if left <= 0:
            return 0
        # the larger root of pair/2 n^2 + linear n = left, in the form that stays exact as the pair's cost goes to 0
        below = math.sqrt(linear * linear + 2 * c.pair_s * left) + linear
        return int(min(2 * left / below, MAX_CHUNK)) if below > 0 else MAX_CHUNK

    def observe(self, load: StepLoad, run_s: float) -> None:
        """Learns from one step that took `run_s` seconds, or finds that it has nothing to teach."""
        if run_s <= 0:
            return
        self._note_error(run_s / self.predict_s(load) - 1, has_prefill=load.tokens > load.rows)
        every = self._learn_every * (LEARN_EVERY if load.tokens == load.rows else 1)
        if self.num_observed >= NUM_SETTLED and every > 1:
            self._num_skipped = (self._num_skipped + 1) % every
            if self._num_skipped:
                self._note_coefficients()
                return
        if self.num_observed == 0:
            self._start_over(run_s / self.predict_s(load))
        self.num_observed += 1
        features = (1, load.rows, load.tokens, load.context, load.attended)
        usual_s = run_s / math.exp(self._pace)
        x = [f * s / usual_s for f, s in zip(features, SCALES, strict=True)]
        fitted = sum(map(float.__mul__, self._theta, x))
        bound = math.inf if self.num_observed <= NUM_TRUSTING else MAX_RELATIVE_ERROR
        self._add((load.tokens.bit_length(), load.context.bit_length()), x, max(fitted - bound, min(fitted + bound, 1)))
        self._solve()

    def follow(self, run_s: float, expected_s: float) -> None:
        """A step took `run_s` where `expected_s` was known of it from elsewhere: learns the machine's pace alone."""
        self._note_error(run_s / expected_s - 1, has_prefill=False)
        self._note_coefficients()

    def _note_error(self, error: float, *, has_prefill: bool) -> None:
        """Follows pace, size and upper quantile of the relative error; the first steps say nothing about a fit."""
        if self.num_observed < NUM_TRUSTING:
            return
        self.mean_error += ERROR_PACE * (min(abs(error), 1.0) - self.mean_error)
        move = OVERRUN_QUANTILE if error > self._overruns[has_prefill] else OVERRUN_QUANTILE - 1
        self._overruns[has_prefill] = max(0.0, min(1.0, self._overruns[has_prefill] + OVERRUN_PACE * move))
        short = max(-MAX_PACE_ERROR, min(MAX_PACE_ERROR, math.log1p(error)))
        self._pace = (1 - PACE_RETURN) * self._pace + PACE_STEP * short

    def _start_over(self, factor: float) -> None:
        """Takes the coefficients, `factor` times as large, for a first guess about an unknown machine."""
        self._theta = [factor * max(t, 1e-3 * p / s) for t, p, s in zip(self._theta, PRIOR_S, SCALES, strict=True)]
        self.num_fits += 1
        self._note_coefficients()
        self._kinds = {}
        self._sums = [0.0] * len(PAIRS) + [0.0] * NUM
        for i, t in enumerate(self._theta):
            self._sums[PAIRS.index((i, i))] = 1 / (PRIOR_VARIANCE * t * t)
            self._sums[len(PAIRS) + i] = 1 / (PRIOR_VARIANCE * t)

    def _add(self, kind: tuple[int, int], x: list[float], y: float) -> None:
        """Adds one equation theta * x = y to its kind, whose older ones fade."""
        new = [x[i] * x[j] for i, j in PAIRS] + [y * f for f in x]
        old = self._kinds.get(kind)
        if old is None:
            self._kinds[kind] = new
            self._sums = list(map(float.__add__, self._sums, new))
            return
        kept = [FORGETTING * o + n for o, n in zip(old, new, strict=True)]
        self._sums = [total + k - o for total, k, o in zip(self._sums, kept, old, strict=True)]
        self._kinds[kind] = kept

    def _solve(self) -> None:
        """Coordinate descent from the last solution, each coefficient kept >= 0. Cost: about 40 microseconds."""
        matrix = [[0.0] * NUM for _ in range(NUM)]
        for (i, j), value in zip(PAIRS, self._sums, strict=False):
            matrix[i][j] = matrix[j][i] = value
        target = self._sums[len(PAIRS) :]
        theta = self._theta
        for _ in range(SWEEPS):
            for i in range(NUM):
                row = matrix[i]
                rest = target[i] - sum(map(float.__mul__, row, theta)) + row[i] * theta[i]
                theta[i] = max(0.0, rest / row[i])
        self.num_fits += 1
        self._note_coefficients()

    def _note_coefficients(self) -> None:
        pace = self._pace_factor = math.exp(self._pace)
        self._coefficients = Coefficients(*(pace * t * s for t, s in zip(self._theta, SCALES, strict=True)))
