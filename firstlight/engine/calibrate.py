"""What steps cost on a backend, from loads of every kind over the real path. Knows scheduler and backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from firstlight.backend.base import Backend
from firstlight.config import EngineConfig
from firstlight.engine.warmup import warm_up
from firstlight.scheduler import SchedulerLimits, StepLoad, StepTimeModel

__all__ = ["MeasuredSteps", "measure_steps"]

LOADS = ((1, 48, 32), (4, 64, 32), (16, 64, 24), (32, 16, 12), (1, 1000, 16), (8, 250, 24), (1, 2500, 8), (16, 400, 12))
"""(requests together, prompt tokens each, output tokens each): a step-time model needs each of its features to vary."""
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """A step-time model fitted to LOADS, and the limits it was measured under."""

    model: StepTimeModel
    limits: SchedulerLimits

    def step_s(self, start: int, num: int) -> float:
        """Seconds of a step that computes `num` tokens of one request at position `start`."""
        load = StepLoad()
        load.add(start, num)
        return self.model.predict_s(load)


def measure_steps(backend: Backend, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> MeasuredSteps:
    """Runs LOADS, each cut to what the limits allow. Raises BackendError.

    Mutates: overwrites KV blocks. Cost: some 20 s for a small model on two cores.
    """
    limits, step_time = SchedulerLimits.of(backend.info, config), StepTimeModel()
    for _ in range(ROUNDS):
        warm_up(backend, limits, step_time, clock, LOADS)
    return MeasuredSteps(step_time, limits)
