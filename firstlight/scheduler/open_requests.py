"""The requests that are open, by where they stand. Knows states and their tables; decides nothing."""

from __future__ import annotations

from collections.abc import Collection

from firstlight.cache import KVCache
from firstlight.scheduler.state import RequestState, Status
from firstlight.scheduler.waiting import WaitingQueue

__all__ = ["OpenRequests"]


class OpenRequests:
    """Every open request is in exactly one of `waiting`, `prefills`, `decodes`. Written by the scheduler's thread."""

    def __init__(self) -> None:
        self.states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue()
        """Those that hold no blocks: not yet admitted, or preempted."""
        self.prefills: dict[str, RequestState] = {}
        self.decodes: dict[str, RequestState] = {}

    @property
    def num_running(self) -> int:
        return len(self.prefills) + len(self.decodes)

    def running(self) -> list[RequestState]:
        """Those that hold blocks, as of now; from any thread."""
        return [*list(self.prefills.values()), *list(self.decodes.values())]

    def streams(self) -> Collection[RequestState]:
        """Those that say tokens, in the order in which they began to."""
        return self.decodes.values()

    def most_urgent_stream(self, default: int) -> int:
        """The smallest priority among streams; `default` without any."""
        return min((state.request.priority for state in self.decodes.values()), default=default)

    def add(self, state: RequestState) -> None:
        """A new request, which waits."""
        self.states[state.id] = state
        self.waiting.add(state)

    def start(self, state: RequestState) -> None:
        """It has been admitted: from now on it computes its prompt."""
        self.waiting.remove(state)
        state.status = Status.PREFILL
        self.prefills[state.id] = state

    def stream(self, state: RequestState) -> None:
        """Its prompt is computed: from now on it computes what it said last."""
        del self.prefills[state.id]
        state.status = Status.DECODE
        self.decodes[state.id] = state

    def preempt(self, state: RequestState) -> None:
        """It waits again, before all others of its class."""
        self.prefills.pop(state.id, None)
        self.decodes.pop(state.id, None)
        state.status = Status.PREEMPTED
        state.rank = (state.request.priority, 0, state.rank[2], state.rank[3])
        self.waiting.add(state)

    def end(self, state: RequestState) -> None:
        """Forgets it, wherever it stood."""
        if state.status in (Status.WAITING, Status.PREEMPTED):
            self.waiting.remove(state)
        self.prefills.pop(state.id, None)
        self.decodes.pop(state.id, None)
        state.status = Status.ENDED
        del self.states[state.id]

    def check(self, cache: KVCache, capacity_tokens: int, *, is_between_steps: bool) -> None:
        """Audits requests, queues, tables and pool against each other. Raises AssertionError saying what is broken."""
        cache.check(state.table for state in self.states.values())
        self.waiting.check()
        homes = [s.id for s in self.waiting] + list(self.prefills) + list(self.decodes)
        assert sorted(homes) == sorted(self.states), "open requests and queues disagree"
        for state in self.states.values():
            where = f"{state.id} ({state.status.value})"
            waits = state.status in (Status.WAITING, Status.PREEMPTED)
            assert waits == (state in self.waiting), f"{where} is in the wrong queue"
            assert (state.status is Status.PREFILL) == (state.id in self.prefills), f"{where} is in the wrong queue"
            assert 0 <= state.num_computed < len(state.tokens) <= capacity_tokens, f"{where}: token counts"
            assert state.num_computed <= len(state.table.blocks) * cache.block_size, f"{where}: blocks are missing"
            if is_between_steps:
                spare = len(state.table.blocks) - cache.num_blocks_for(state.num_computed)
                assert spare == 0, f"{where} holds {spare} blocks that no computed token is in"
            assert not (waits and state.table.blocks), f"{where} holds blocks"
            if state.status is Status.DECODE:
                assert state.gap == 1, f"{where} has {state.gap} tokens to compute"
                assert state.num_output > 0, f"{where} has said nothing"
        if not self.states:
            free = cache.num_free + cache.num_pinned + cache.num_moving
            assert free == cache.num_blocks, "blocks are held while no request is open"
