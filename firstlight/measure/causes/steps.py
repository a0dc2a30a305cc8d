"""One step as it went, and how its time divides among the rows in it. Knows counts and seconds."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

__all__ = ["StepRecord", "StepShare", "StepSplit"]


class StepShare(NamedTuple):
    """One request's row in a step."""

    request_id: str
    start: int
    """Position of its first token."""
    num_tokens: int
    is_prefill: bool


class StepSplit(NamedTuple):
    """A step's seconds as one of its rows feels them; they sum to the step's time."""

    own_s: float
    """What a step with this row alone would have taken."""
    shared_s: float
    """Added by other streams' tokens."""
    chunks_s: float
    """Added by other requests' prefill chunks."""
    machine_s: float
    """Threads were ready to run, and the machine ran something else."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step as it went. Times in seconds; `start_s` and `end_s` on the core's monotonic clock."""

    step_id: int
    start_s: float
    end_s: float
    rows: int
    tokens: int
    context: int
    attended: int
    predicted_s: float
    plan_s: float
    run_s: float
    absorb_s: float
    shares: tuple[StepShare, ...] = ()
    coefficients: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """What the step-time model held for the cost of a step, a row, a token, a token of context, a query-key pair."""
    machine_s: float = 0.0
    """What the machine took from it (`run_delay.machine_s`); 0 where the system does not tell."""
    waiting: int = 0
    """Requests in the queue while it ran."""
    queue_reason: str = ""
    """Why they were not in it."""
    used_blocks: int = 0
    op_times_s: dict[str, float] | None = None
    """Seconds by kind of op, while somebody traces."""

    def split(self, at: int) -> StepSplit:
        """The step's time for the row `shares[at]`. Cost: linear in rows, about a microsecond each."""
        step, row, token, context, pair = self.coefficients
        own = shared = chunks = 0.0
        for i, share in enumerate(self.shares):
            num, start = share.num_tokens, share.start
            cost = row + token * num + context * (start + num) + pair * (num * start + num * (num + 1) // 2)
            if i == at:
                own += step + cost
            elif share.is_prefill:
                chunks += cost
            else:
                shared += cost
        total_s = self.end_s - self.start_s
        machine_s = min(self.machine_s, total_s)
        whole = own + shared + chunks
        if whole <= 0:
            return StepSplit(total_s - machine_s, 0.0, 0.0, machine_s)
        scale = (total_s - machine_s) / whole
        shared_s, chunks_s = shared * scale, chunks * scale
        return StepSplit(total_s - machine_s - shared_s - chunks_s, shared_s, chunks_s, machine_s)
