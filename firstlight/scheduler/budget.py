"""How many prefill tokens a step may carry without being felt by the streams in it. Knows loads and seconds."""

from __future__ import annotations

from typing import NamedTuple

from firstlight.scheduler.limits import SchedulerLimits
from firstlight.scheduler.steptime import StepLoad, StepTimeModel
from firstlight.scheduler.undisturbed import UndisturbedGap

__all__ = ["BATCH", "INTERACTIVE", "STANDARD", "PrefillBudget", "Promise", "promise_of"]

INTERACTIVE, STANDARD, BATCH = -1, 0, 1
"""Priorities with a name; smaller goes first."""


class Promise(NamedTuple):
    """The longest gap a step may cause its streams: `steps` times their undisturbed step, and `extra_s`.

    With `--itl-slo-ms`, `slo_factor` times that instead.
    """

    steps: float
    extra_s: float
    slo_factor: float


PROMISES = {
    INTERACTIVE: Promise(1.5, 0.005, 0.6),
    STANDARD: Promise(2.0, 0.010, 1.0),
    BATCH: Promise(6.0, 0.100, 4.0),
}
MIN_OVERRUN = 0.02
"""Steps are filled to this share below the promise at least; further where prefill overruns its prediction by more.
Each percent costs a 4,000-token prompt beside 8 streams about 5 % of its time, because streams grow meanwhile."""
STARVATION_S = 0.25
STARVED_CHUNK_TOKENS = 16
"""While streams leave no room, prefill still gets so many tokens every STARVATION_S."""
ALONE_STEP_S = 0.25
"""Without streams a step may take this long: whoever arrives during it waits for its end. The weights are read once
more per step, a few milliseconds, so that this costs prefill about 2 %."""
ALONE_CHUNK_TOKENS = 64
"""... but it carries so many tokens on any machine, since below this kernels lose speed."""


def promise_of(priority: int) -> Promise:
    """The promise made to requests of this priority."""
    return PROMISES[max(INTERACTIVE, min(BATCH, priority))]


class PrefillBudget:
    """The prefill share of one step after another. `open`, then `chunk` per candidate, then `close`."""

    def __init__(self, limits: SchedulerLimits, step_time: StepTimeModel) -> None:
        self._limits = limits
        self._step_time = step_time
        self._budget_s: float | None = None
        self._now_s = 0.0
        self._last_chunk_s = 0.0
        self._undisturbed = UndisturbedGap(step_time)

    def open(self, decodes: StepLoad, now_s: float, promise: Promise = PROMISES[STANDARD]) -> None:
        """Begins a step that carries the streams `decodes`, the most demanding of which were promised `promise`."""
        self._now_s = now_s
        if decodes.rows == 0:
            self._budget_s = None
            return
        if self._limits.itl_slo_s > 0:
            promised_s = promise.slo_factor * self._limits.itl_slo_s
        else:
            promised_s = promise.steps * self._undisturbed.gap_s(decodes, now_s) + promise.extra_s
        run_s = promised_s - min(self._undisturbed.overhead_s, promised_s / 2)
        self._budget_s = run_s / (1 + max(MIN_OVERRUN, self._step_time.overrun))

    def chunk(self, load: StepLoad, start: int, gap: int, *, is_first: bool) -> int:
        """Tokens that a prefill with `gap` tokens left at `start` may compute on top of `load`; 0: no more prefill.

        Args:
            is_first: no prefill is in the step yet, so that the starvation bound may be due.
        """
        left = min(gap, self._limits.max_step_tokens - load.tokens)
        if left <= 0:
            return 0
        if self._budget_s is None:
            fits = self._step_time.max_chunk(load, start, ALONE_STEP_S)
            return min(left, max(fits, ALONE_CHUNK_TOKENS - load.tokens))
        fits = min(left, self._step_time.max_chunk(load, start, self._budget_s))
        if fits == 0 and is_first and self._now_s - self._last_chunk_s >= STARVATION_S:
            return min(left, STARVED_CHUNK_TOKENS)
        return fits

    def has_room(self, load: StepLoad, *, is_first: bool) -> bool:
        """Whether any prefill at all could join a step of this load."""
        return self.chunk(load, 0, 1, is_first=is_first) > 0

    def close(self, *, was_starved: bool) -> None:
        """Ends the planning of a step; `was_starved`: a prefill was there and got nothing."""
        if not was_starved:
            self._last_chunk_s = self._now_s

    def ended(self, load: StepLoad, gap_s: float, run_s: float, now_s: float) -> None:
        """A step of streams alone has run; the one before it ended `gap_s` ago."""
        self._undisturbed.note(load, gap_s, run_s, now_s)
