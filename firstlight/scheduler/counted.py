"""The scheduler for a simulated device: the same plans, with the streams in them counted instead of spelled out.

A stream is touched when it begins, fills a block or ends; between these only sums move, so that a step costs the same
beside a hundred streams as beside one. Knows how much streams say, not what.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from firstlight.cache import KVCache
from firstlight.errors import RequestError
from firstlight.scheduler.limits import SchedulerLimits
from firstlight.scheduler.open_requests import OpenRequests
from firstlight.scheduler.scheduler import Scheduler
from firstlight.scheduler.state import RequestState
from firstlight.scheduler.step import PlannedStep
from firstlight.scheduler.steptime import StepTimeModel
from firstlight.types import CoreRequest, FinishReason, StepResult, TokenEvent

__all__ = ["CountedScheduler"]


class Span(NamedTuple):
    """A request got one token in each of the steps `first`..`end` - 1, counted over steps that had streams in them."""

    request_id: str
    first: int
    end: int


@dataclass(slots=True)
class _Stream:
    state: RequestState
    serial: int
    """Streams take their turn in a step in the order in which they began."""
    first: int
    """The first step it takes part in."""
    counted: int
    """What is in its state is from before this step."""


class _CountedRequests(OpenRequests):
    """Open requests whose streams' states are brought up to date only when somebody looks."""

    def __init__(self, block_size: int, output_token: int) -> None:
        super().__init__()
        self.advance: Callable[[RequestState, int], None]
        """Counts tokens of a request as computed: the scheduler's."""
        self.num_steps = 0
        """Steps absorbed that had streams in them."""
        self.num_tokens = 0
        """Known tokens of all streams."""
        self.spans: list[Span] = []
        self.tenants: Counter[bytes] = Counter()
        self._block_size = block_size
        self._output_token = output_token
        self._streams: dict[str, _Stream] = {}
        self._num_started = 0
        self._due: list[tuple[int, int, _Stream]] = []
        """When each stream fills a block or ends, a heap; some have left since."""
        self._short: list[_Stream] = []
        self._priorities: Counter[int] = Counter()

    def running(self) -> list[RequestState]:
        return [*self.prefills.values(), *self.streams()]

    def streams(self) -> Collection[RequestState]:
        for stream in self._streams.values():
            self._bring_up(stream)
        return self.decodes.values()

    def most_urgent_stream(self, default: int) -> int:
        return min(self._priorities, default=default)

    def _bring_up(self, stream: _Stream) -> None:
        num = self.num_steps - stream.counted
        if num:
            stream.counted = self.num_steps
            stream.state.tokens.extend([self._output_token] * num)
            self.advance(stream.state, num)

    def stream(self, state: RequestState) -> None:
        super().stream(state)
        self._num_started += 1
        stream = self._streams[state.id] = _Stream(state, self._num_started, self.num_steps, self.num_steps)
        self.num_tokens += len(state.tokens)
        self._priorities[state.request.priority] += 1
        self.tenants[state.request.tenant] += 1
        self._watch(stream)

    def _watch(self, stream: _Stream) -> None:
        """Says when the stream, which is up to date, has to be looked at next."""
        state, size = stream.state, self._block_size
        if state.num_computed == len(state.table.blocks) * size:
            self._short.append(stream)
        steps = min(size - state.num_computed % size, state.max_tokens - state.num_output)
        heapq.heappush(self._due, (self.num_steps + steps, stream.serial, stream))

    def preempt(self, state: RequestState) -> None:
        self._leave(state)
        super().preempt(state)

    def end(self, state: RequestState) -> None:
        self._leave(state)
        super().end(state)

    def _leave(self, state: RequestState) -> None:
        """Forgets a stream whose state was brought up to date."""
        stream = self._streams.pop(state.id, None)
        if stream is None:
            return
        assert stream.counted == self.num_steps
        self.spans.append(Span(state.id, stream.first, stream.counted))
        self.num_tokens -= len(state.tokens)
        self._priorities -= Counter([state.request.priority])
        self.tenants -= Counter([state.request.tenant])

    def _is_streaming(self, stream: _Stream) -> bool:
        return self._streams.get(stream.state.id) is stream

    def count_step(self) -> Iterator[RequestState]:
        """One more token for every stream. Gives those that have all of theirs, in their turn, to be ended at once."""
        self.num_steps += 1
        self.num_tokens += len(self._streams)
        while self._due and self._due[0][0] == self.num_steps:
            stream = heapq.heappop(self._due)[2]
            if not self._is_streaming(stream):
                continue
            self._bring_up(stream)
            if stream.state.num_output < stream.state.max_tokens:
                self._watch(stream)
            else:
                yield stream.state

    def short(self) -> list[RequestState]:
        """Streams whose next token needs another block, in their turn; each is named once."""
        short, self._short = sorted(self._short, key=lambda stream: stream.serial), []
        return [stream.state for stream in short if self._is_streaming(stream)]


class CountedScheduler(Scheduler):
    """Plans and absorbs what `Scheduler` would for requests that run to `max_tokens`.

    A plan's rows are its prefill chunks alone; `planned_load` has the streams in it too. `absorb` gives an event for a
    stream only where it ends; `take_spans` says in which steps streams got their tokens.

    Args:
        output_token: stands for every token that a stream says.
    """

    _open: _CountedRequests

    def __init__(
        self,
        cache: KVCache,
        limits: SchedulerLimits,
        *,
        clock: Callable[[], float],
        step_time: StepTimeModel,
        output_token: int,
    ) -> None:
        requests = _CountedRequests(cache.block_size, output_token)
        super().__init__(cache, limits, clock=clock, step_time=step_time, requests=requests)
        requests.advance = self._advance

    @property
    def num_stream_steps(self) -> int:
        """Steps absorbed that had streams in them."""
        return self._open.num_steps

    def take_spans(self) -> list[Span]:
        """Of requests that ended or gave way since the last call, the steps in which they streamed."""
        spans, self._open.spans = self._open.spans, []
        return spans

    def add(self, request: CoreRequest) -> None:
        """Queues a request. Raises RequestError (never servable, or not counted) or OverloadedError."""
        if request.stop_ids or request.forced_ids:
            raise RequestError("`stop_ids` and `forced_ids` mean nothing where tokens are only counted")
        super().add(request)

    def _secure_decode_blocks(self) -> None:
        for state in self._open.short():
            while state.id in self._open.decodes and not self.cache.grow(state.table, state.num_computed + 1):
                self._make_room()

    def _plan_decodes(self, step: PlannedStep) -> None:
        load, num = step.load, len(self._open.decodes)
        load.rows += num
        load.tokens += num
        load.context += self._open.num_tokens
        load.attended += self._open.num_tokens

    def absorb(self, result: StepResult) -> list[TokenEvent]:
        """Takes a step's result: an event per prompt that is complete, and per stream that ended."""
        events = []
        if self._open.decodes:
            self.stats.output_tokens += len(self._open.decodes)
            for tenant, num in self._open.tenants.items():
                self._served.add(tenant, 0, num)
            events = [self._end(state, FinishReason.LENGTH) for state in self._open.count_step()]
        return events + super().absorb(result)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request wherever it stands and frees its blocks; None if it is not open."""
        self._open.streams()
        return super().abort(request_id)
