"""What a fake step costs, and a clock that only moves when told to."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.types import StepPlan

__all__ = ["StepCost", "VirtualClock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: per step, per row, per token computed, and per query-key pair attended."""

    step_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    attended_s: float = 0.0

    def of(self, plan: StepPlan) -> float:
        """The step's seconds."""
        total = self.step_s + self.row_s * len(plan.rows)
        for row in plan.rows:
            num = len(row.token_ids)
            total += self.token_s * num + self.attended_s * (num * row.start + num * (num + 1) // 2)
        return total


class VirtualClock:
    """Seconds that pass only by `advance`. Call it to read it, like time.monotonic."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
