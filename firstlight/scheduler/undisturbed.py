"""What gap the running streams are used to: measured while no prefill is beside them, remembered while one is.

Knows loads and seconds. A model of step time that is a few percent off would shift every promise by twice that.
"""

from __future__ import annotations

import statistics
from collections import deque

from firstlight.scheduler.steptime import StepLoad, StepTimeModel

__all__ = ["UndisturbedGap"]

NUM_GAPS, EVERY = 31, 3
"""Of so many gaps without prefill the middle one counts, so that a slow stretch promises nothing; once there are so
many, one in EVERY is kept, so that they tell of the last two seconds or so."""
MEMORY_S = 300.0
"""While prefill never pauses, what streams are used to follows their growing context, and the model, this slowly."""


class UndisturbedGap:
    """`note` every gap between two steps' ends, ask `gap_s` for what the streams of a step were used to."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._gaps: deque[tuple[StepLoad, float, float]] = deque(maxlen=NUM_GAPS)
        self._num_noted = 0
        self._context = 0.0
        """Tokens of context per stream that the promise is about."""
        self._noted_s = self._asked_s = 0.0
        self.overhead_s = 0.0
        """What a gap takes beyond the step's run."""
        self._ratio = 1.0
        """Of run and fitted time, over the gaps; as of the model's fit number `_fit`."""
        self._fit = -1

    def note(self, load: StepLoad, gap_s: float, run_s: float, now_s: float) -> None:
        """A step of streams alone ended at `now_s`, `gap_s` after the one before it."""
        self._num_noted += 1
        if len(self._gaps) < NUM_GAPS or self._num_noted % EVERY == 0:
            self._gaps.append((load, gap_s, min(run_s, gap_s)))
            self.overhead_s = statistics.median(gap_s - run_s for _, gap_s, run_s in self._gaps)
            self._fit = -1
        self._context = load.context / load.rows
        self._noted_s = self._asked_s = now_s

    def gap_s(self, decodes: StepLoad, now_s: float) -> float:
        """The gap these streams had before prefill came, at the context they had then.

        Without that the promise would grow with the context that streams gain while a long prompt is computed. Streams
        that came or went since are accounted for by what the model says of their number.
        """
        context = decodes.context / decodes.rows
        self._context += min(1.0, (now_s - self._asked_s) / MEMORY_S) * (context - self._context)
        self._asked_s = now_s
        kept = min(1.0, self._context / context)
        load = StepLoad(decodes.rows, decodes.tokens, round(decodes.context * kept), round(decodes.attended * kept))
        predicted_s = self._step_time.predict_s(load)
        if not self._gaps:
            return predicted_s
        measured_s = self._step_time.fitted_s(load) * self._measured_ratio() + self.overhead_s
        forgotten = min(1.0, (now_s - self._noted_s) / MEMORY_S)
        return measured_s + forgotten * (predicted_s + self.overhead_s - measured_s)

    def _measured_ratio(self) -> float:
        """How much longer steps without prefill ran than fitted; worked out anew when either has changed."""
        if self._fit != self._step_time.num_fits:
            self._fit = self._step_time.num_fits
            fitted_s = self._step_time.fitted_s
            self._ratio = statistics.median(run_s / fitted_s(noted) for noted, _, run_s in self._gaps)
        return self._ratio
