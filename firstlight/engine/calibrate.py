"""What steps cost on a backend, from loads of every kind over the real path. Knows scheduler and backend."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from firstlight.backend.base import Backend
from firstlight.config import EngineConfig
from firstlight.engine.warmup import warm_up
from firstlight.scheduler import Coefficients, SchedulerLimits, StepLoad, StepTimeModel

__all__ = ["MeasuredSteps", "fit_steps", "measure_steps"]

LOADS = ((1, 48, 32), (4, 64, 32), (16, 64, 24), (32, 16, 12), (1, 1000, 16), (8, 250, 24), (1, 2500, 8), (16, 400, 12))
"""(requests together, prompt tokens each, output tokens each): a step-time model needs each of its features to vary."""
FEW_STEPS = 8
"""Steps of one kind weigh together as much as those of any other, but so few weigh less."""
MAX_RATIO = 2.0
"""A step counts as at most so many times its fit, and as no less than the inverse: the machine was elsewhere."""
FITS, SWEEPS = 20, 300


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What steps cost, scheduling included, and the limits they were measured under."""

    coefficients: Coefficients
    num_steps: int
    mean_error: float
    """Mean of |real - fitted| / fitted."""
    limits: SchedulerLimits

    def predict_s(self, load: StepLoad) -> float:
        """Seconds from one step's end to the next one's."""
        return sum(map(float.__mul__, self.coefficients, map(float, _features(load))))

    def step_s(self, start: int, num: int) -> float:
        """Seconds of a step that computes `num` tokens of one request at position `start`."""
        load = StepLoad()
        load.add(start, num)
        return self.predict_s(load)


def measure_steps(
    backend: Backend, config: EngineConfig, num_rounds: int, clock: Callable[[], float] = time.monotonic
) -> MeasuredSteps:
    """Runs LOADS `num_rounds` times, each cut to what the limits allow. Raises BackendError.

    Mutates: overwrites KV blocks. Cost: some 20 s a round for a small model on two cores.
    """
    limits, step_time = SchedulerLimits.of(backend.info, config), StepTimeModel()
    warm_up(backend, limits, step_time, clock)
    loads: list[StepLoad] = []
    times_s: list[float] = []
    for batch in LOADS * num_rounds:
        ends: list[tuple[StepLoad, float]] = []

        def note(load: StepLoad, ends: list[tuple[StepLoad, float]] = ends) -> None:
            ends.append((load, clock()))

        warm_up(backend, limits, step_time, clock, [batch], note)
        for (_, before_s), (load, end_s) in pairwise(ends):  # the first step also waited for its prompts to be made
            loads.append(load)
            times_s.append(end_s - before_s)
    coefficients, mean_error = fit_steps(loads, times_s)
    return MeasuredSteps(coefficients, len(loads), mean_error, limits)


def fit_steps(loads: Sequence[StepLoad], times_s: Sequence[float]) -> tuple[Coefficients, float]:
    """What the parts of a step cost on the mean, each >= 0, and the mean relative error.

    The scheduler's model follows the machine; this one is of all steps alike, since how fast the last ten were says
    little of the next thousand. Weighted least squares by coordinate descent, the weights from the fit before.
    """
    x = np.array([_features(load) for load in loads], dtype=np.float64)
    scales = x.max(axis=0)
    x /= scales
    y = np.array(times_s)
    kinds = [(load.tokens.bit_length(), load.context.bit_length()) for load in loads]
    sizes = Counter(kinds)
    weights = np.array([1 / max(FEW_STEPS, sizes[kind]) for kind in kinds])
    theta, fitted, clipped = np.zeros(x.shape[1]), y, y
    for _ in range(FITS):
        weighted = x * (weights / fitted**2)[:, None]
        matrix, target = weighted.T @ x, weighted.T @ clipped
        for _ in range(SWEEPS):
            for i in range(len(theta)):
                theta[i] = max(0.0, theta[i] + (target[i] - matrix[i] @ theta) / matrix[i, i])
        fitted = x @ theta
        clipped = np.clip(y, fitted / MAX_RATIO, fitted * MAX_RATIO)
    return Coefficients(*(theta / scales).tolist()), float(np.mean(np.abs(y / fitted - 1)))


def _features(load: StepLoad) -> tuple[int, ...]:
    """In the order of Coefficients."""
    return (1, load.rows, load.tokens, load.context, load.attended)
