"""A deterministic backend without weights: its answers depend on the tokens read through the block table alone."""

from firstlight.backend.fake.backend import FakeBackend
from firstlight.backend.fake.cost import StepCost, VirtualClock

__all__ = ["FakeBackend", "StepCost", "VirtualClock"]
