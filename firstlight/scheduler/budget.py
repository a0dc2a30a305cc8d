"""How many prefill tokens a step may carry without being felt by the streams in it. Knows loads and seconds."""

from __future__ import annotations

from firstlight.scheduler.limits import SchedulerLimits
from firstlight.scheduler.steptime import StepLoad, StepTimeModel

__all__ = ["PrefillBudget"]

SLO_DECODE_STEPS = 2.0
"""Without `itl_slo_ms`, prefill may stretch a step to this many times its decode-only time."""
SLO_FLOOR_S = 0.025
"""... and always to this: 40 tokens a second are several times reading speed, so shorter gaps are not felt."""
STARVATION_S = 0.25
STARVED_CHUNK_TOKENS = 16
"""While streams leave no room, prefill still gets so many tokens every STARVATION_S."""
ALONE_STEP_S = 0.25
"""Without streams a step may take this long: whoever arrives during it waits for its end. The weights are read once
more per step, a few milliseconds, so that this costs prefill about 2 %."""
ALONE_CHUNK_TOKENS = 64
"""... but it carries so many tokens on any machine, since below this kernels lose speed."""


class PrefillBudget:
    """The prefill share of one step after another. `open`, then `chunk` per candidate, then `close`."""

    def __init__(self, limits: SchedulerLimits, step_time: StepTimeModel) -> None:
        self._limits = limits
        self._step_time = step_time
        self._budget_s: float | None = None
        self._now_s = 0.0
        self._last_chunk_s = 0.0

    def open(self, decodes: StepLoad, now_s: float) -> None:
        """Begins a step that carries the streams `decodes`."""
        self._now_s = now_s
        if decodes.rows == 0:
            self._budget_s = None
        elif self._limits.itl_slo_s > 0:
            self._budget_s = self._limits.itl_slo_s
        else:
            self._budget_s = max(SLO_FLOOR_S, SLO_DECODE_STEPS * self._step_time.predict_s(decodes))

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
        """Ends a step; `was_starved`: a prefill was there and got nothing."""
        if not was_starved:
            self._last_chunk_s = self._now_s
