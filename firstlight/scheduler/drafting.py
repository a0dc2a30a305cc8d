"""Which drafts the next step checks, and what it learns from them: from a drafter or, where they pay, by prompt lookup.

Knows the open streams and whether there is room for their drafts; a step's rows are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.cache import KVCache
from firstlight.scheduler.drafts import Drafter
from firstlight.scheduler.limits import SchedulerLimits
from firstlight.scheduler.open_requests import OpenRequests
from firstlight.scheduler.speculation import MAX_STREAMS, Speculation
from firstlight.scheduler.state import RequestState
from firstlight.scheduler.step import PlannedStep
from firstlight.scheduler.steptime import StepLoad, StepTimeModel

__all__ = ["Drafting"]

MAX_DRAFTS = 16
"""Draft tokens asked for per row and step."""


class Drafting:
    """`begin` when a step is planned; `learned` for each of its streams and `ran` once when it is absorbed.

    Args:
        drafter: proposes in every step; without one `limits.speculate` decides.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: SchedulerLimits,
        step_time: StepTimeModel,
        requests: OpenRequests,
        drafter: Drafter | None,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._step_time = step_time
        self._open = requests
        self._drafter = drafter
        is_lookup = drafter is None and limits.speculate == "lookup"
        self._speculation = Speculation(step_time, limits.itl_slo_s) if is_lookup else None

    def begin(self) -> dict[str, list[int]]:
        """Drafts by request, with blocks for them. Mutates: allocates, but only where blocks are free anyway."""
        if self._drafter is not None:
            wanted = self._proposed(self._drafter)
        elif self._speculation is not None:
            wanted = self._that_pay(self._speculation)
        else:
            return {}
        states = self._open.states
        return {id: drafts for id, drafts in wanted.items() if self._has_blocks(states[id], len(drafts))}

    def _proposed(self, drafter: Drafter) -> dict[str, list[int]]:
        spare, wanted = self._room(), {}
        for state in self._open.decodes.values():
            most = min(spare, MAX_DRAFTS, state.max_drafts)
            if most > 0 and (drafts := list(drafter(state.id, state.tokens, most))[:most]):
                wanted[state.id] = drafts
                spare -= len(drafts)
        return wanted

    def _that_pay(self, speculation: Speculation) -> dict[str, list[int]]:
        """None beside prompts, which have a better use for the time."""
        streams = list(self._open.decodes.values())
        if not 0 < len(streams) <= MAX_STREAMS or self._open.prefills or self._open.waiting:
            speculation.pause()
            return {}
        load = StepLoad()
        for state in streams:
            load.add(state.num_computed, 1)
        return speculation.draft(streams, load, self._room())

    def _room(self) -> int:
        """Drafts a step has room for: tokens that streams leave, samples that no row may need for itself."""
        limits = self._limits
        samples = limits.max_step_samples or limits.max_step_tokens
        return min(limits.max_step_tokens - len(self._open.decodes), samples - limits.max_step_rows)

    def _has_blocks(self, state: RequestState, num_drafts: int) -> bool:
        return self._cache.grow(state.table, state.num_computed + 1 + num_drafts)

    def learned(self, request_id: str, new: Sequence[int]) -> None:
        """What was sampled for a stream, up to the first draft that did not stand."""
        if self._speculation is not None:
            self._speculation.learned(request_id, new)

    def ran(self, step: PlannedStep, run_s: float) -> None:
        """The step took `run_s`: teaches the step-time model, or what drafts cost beyond it."""
        if self._speculation is None or step.num_drafts == 0:
            self._step_time.observe(step.load, run_s)
        if self._speculation is not None and not step.prefill_ids and step.load.rows <= MAX_STREAMS:
            self._speculation.ran(step.load, step.num_drafts, run_s)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._speculation is not None:
            self._speculation.forget(request_id)
