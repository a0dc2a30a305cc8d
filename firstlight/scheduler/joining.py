"""Which prompts may be in a step, best first, and who of those that wait is admitted on the way.

Knows order, room, batches, what others compute and what a tier brings; not how many tokens fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.cache import KVCache
from firstlight.scheduler.admission import Admission
from firstlight.scheduler.fairness import ServedTokens
from firstlight.scheduler.limits import SchedulerLimits
from firstlight.scheduler.loading import Loading
from firstlight.scheduler.modes import BatchGate
from firstlight.scheduler.open_requests import OpenRequests
from firstlight.scheduler.state import RequestState, Status
from firstlight.scheduler.step import PlannedStep
from firstlight.scheduler.waiting import rank_of

__all__ = ["Joining"]


class Joining:
    """Admits waiting requests as a step asks for more prompts."""

    def __init__(
        self,
        cache: KVCache,
        limits: SchedulerLimits,
        requests: OpenRequests,
        *,
        admission: Admission,
        loading: Loading,
        served: ServedTokens,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._open = requests
        self._admission = admission
        self._loading = loading
        self._served = served
        self._gate = BatchGate(limits)
        self.copies: dict[str, tuple[int, int]] = {}
        """Per request admitted since the last step, the block to copy for it before the next one's rows run."""

    @property
    def wake_at_s(self) -> float | None:
        """When a batch starts that waits to fill now; None where none does."""
        return self._gate.wake_at_s

    def open_gate(self, now_s: float) -> None:
        """Before a step: may a batch start?"""
        waiting = self._open.waiting
        is_busy = self._open.num_running + waiting.num_returning > 0
        oldest_s = None if is_busy else waiting.oldest_arrival_s()
        self._gate.open(now_s, len(waiting) - waiting.num_returning, oldest_s, is_busy=is_busy)

    def candidates(self, step: PlannedStep) -> Iterator[RequestState]:
        """Running prefills and whoever can be admitted, best rank first; each is admitted when it is asked for.

        Mutates: notes in `step` who could not be, and why.
        """
        prefills = sorted(self._open.prefills.values(), key=rank_of)
        waiting = self._open.waiting.ordered(self._served.excess)
        following = next(waiting, None)
        while prefills or following is not None:
            if following is None or (prefills and rank_of(prefills[0]) < rank_of(following)):
                yield prefills.pop(0)
                continue
            state, following = following, next(waiting, None)
            if self._awaits_equal_prefix(state):
                step.held.append((state.id, "prefix"))
                continue
            if not self._may_start(state):
                step.refusal = step.refusal or "batch"
                continue
            if self._awaits_load(state):
                step.held.append((state.id, "load"))
                continue
            if not self._admit(state):
                step.refusal = step.refusal or self._refusal()
                following = None  # nobody overtakes the one that does not fit
                continue
            yield state

    def why_waiting(self, step: PlannedStep) -> str:
        """Why the queue is not in the step: "kv", "rows", "batch", "order", "capacity"; "": nobody waits."""
        waiting = self._open.waiting
        if not waiting:
            return ""
        if not step.refusal:
            first = next(iter(waiting))
            if self._open.num_running and not self._has_room(first, self._cache.peek(first.table, first.tokens)):
                step.refusal = self._refusal()
        return step.refusal or ("order" if step.prefill_ids else "capacity")

    def _refusal(self) -> str:
        return "rows" if self._open.num_running >= self._limits.max_step_rows else "kv"

    def _may_start(self, state: RequestState) -> bool:
        return state.status is Status.PREEMPTED or self._gate.has_room

    def _awaits_equal_prefix(self, state: RequestState) -> bool:
        """True while a request that is not less urgent computes the very block this one needs next."""
        key = state.awaited_key
        if key is None or self._cache.claimant(key) is None:
            hits = self._cache.peek(state.table, state.tokens)
            key = state.awaited_key = self._cache.first_missing_key(state.table, len(hits))
        owner = self._open.prefills.get((key and self._cache.claimant(key)) or "")
        return owner is not None and owner.request.priority <= state.request.priority

    def _awaits_load(self, state: RequestState) -> bool:
        """True while a tier brings blocks that this request, which has room otherwise, needs next."""
        if self._cache.tiering is None:
            return False
        has_room = state.is_loading or self._has_room(state, self._cache.peek(state.table, state.tokens))
        return self._loading.awaits(state, has_room=has_room)

    def _has_room(self, state: RequestState, hits: list[int]) -> bool:
        """Whether rows and blocks suffice: it must be able to run to its predicted end without taking blocks that
        running requests will need to theirs."""
        if self._open.num_running >= self._limits.max_step_rows:
            return False
        if self._open.num_running == 0:
            return True
        if self._admission.was_refused(state, hits):
            return False
        return self._admission.fits(state, hits, self._open.prefills.values(), self._open.streams())

    def _admit(self, state: RequestState) -> bool:
        """Starts a waiting request on its cached prefix; False when there is no room for it."""
        cache = self._cache
        hits = cache.peek(state.table, state.tokens)
        if not self._has_room(state, hits):
            return False
        self._open.start(state)
        state.num_computed = cache.adopt(state.table, state.tokens, hits)
        if (rest := cache.adopt_rest(state.table, state.tokens)) is not None:
            state.num_computed += rest[0]
            self.copies[state.id] = rest[1]
        if state.num_preemptions == 0:
            state.cached_tokens = state.high_water = state.num_computed
            state.cache_miss = cache.miss(state.table, len(hits))
            num_loaded = sum(ticket.num_loaded for ticket in state.tickets)
            state.loaded_tokens = min(num_loaded, len(hits)) * cache.block_size
            self._gate.started()
        return True
