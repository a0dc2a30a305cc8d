"""The scheduler's bounds and counters. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from firstlight.backend.base import BackendInfo
from firstlight.config import EngineConfig
from firstlight.scheduler.state import Status
from firstlight.types import FinishReason

__all__ = ["SchedulerLimits", "SchedulerStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The bounds a scheduler works in; all at least 1, `itl_slo_s` 0 means: from the step-time model."""

    max_step_rows: int
    max_step_tokens: int
    max_model_len: int
    vocab_size: int
    max_step_samples: int = 0
    """0: as many as tokens."""
    max_queue: int = 1024
    max_queue_s: float = 0.0
    """Predicted seconds a request may wait before it is refused; 0: any."""
    itl_slo_s: float = 0.0
    mode: str = "continuous"
    batch_size: int = 8
    batch_wait_s: float = 0.0
    """0: the mode's own."""
    reserve_output: bool = True
    preempt: str = "least-work"
    speculate: str = "off"

    @classmethod
    def of(cls, info: BackendInfo, config: EngineConfig) -> SchedulerLimits:
        """The tighter of what the backend can and what the operator allows."""
        tokens = min(info.max_step_tokens, config.max_step_tokens)
        return cls(
            max_step_rows=min(info.max_step_rows, config.max_step_rows, tokens),
            max_step_tokens=tokens,
            max_model_len=min(info.max_model_len, config.max_model_len or info.max_model_len),
            vocab_size=info.vocab_size,
            max_step_samples=info.max_step_samples,
            max_queue=config.max_queue,
            max_queue_s=config.max_queue_s,
            itl_slo_s=config.itl_slo_ms / 1e3,
            mode=config.mode,
            batch_size=config.batch_size,
            batch_wait_s=config.batch_wait_ms / 1e3,
            reserve_output=config.reserve_output,
            preempt=config.preempt,
            speculate=config.speculate,
        )


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start. Written by the scheduler alone."""

    steps: int = 0
    preemptions: int = 0
    expired: int = 0
    """Requests whose deadline passed while they waited."""
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption; among `prefill_tokens`."""
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    aborted: dict[str, int] = field(default_factory=lambda: {s.value: 0 for s in Status if s is not Status.ENDED})

    def copy(self) -> SchedulerStats:
        """The counters as of now, which later steps leave alone."""
        return replace(self, finished=dict(self.finished), aborted=dict(self.aborted))
