"""A deterministic backend without weights: the answer depends on every token read through the block table, and on nothing else."""

from firstlight.backend.fake.backend import FakeBackend
from firstlight.backend.fake.cost import StepCost, VirtualClock

__all__ = ["FakeBackend", "StepCost", "VirtualClock"]
