"""What steps cost on a backend, from loads of every kind over the real path. Knows scheduler and backend."""

from __future__ import annotations

import time
from collections.abc import Callable

from firstlight.backend.base import Backend
from firstlight.engine.warmup import warm_up
from firstlight.scheduler import SchedulerLimits, StepTimeModel

__all__ = ["measure_steps"]

LOADS = ((1, 48, 32), (4, 64, 32), (16, 64, 24), (32, 16, 12), (1, 1000, 16), (8, 250, 24), (1, 2500, 8), (16, 400, 12))
"""(requests together, prompt tokens each, output tokens each): a step-time model needs each of its features to vary."""
ROUNDS = 2


def measure_steps(
    backend: Backend, limits: SchedulerLimits, clock: Callable[[], float] = time.monotonic
) -> StepTimeModel:
    """A model fitted to LOADS, each cut to what the limits allow. Raises BackendError.

    Mutates: overwrites KV blocks. Cost: some 20 s for a small model on two cores.
    """
    step_time = StepTimeModel()
    for _ in range(ROUNDS):
        warm_up(backend, limits, step_time, clock, LOADS)
    return step_time
