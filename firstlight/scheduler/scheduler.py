"""The scheduler: what every request computes in the next step, and what the step's result means.

Pure: the clock is an argument, nothing is read from a device. Knows token ids and predicted seconds, no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from firstlight.cache import KVCache
from firstlight.errors import DeadlineError, RequestError
from firstlight.measure.causes import StepShare
from firstlight.scheduler.admission import Admission
from firstlight.scheduler.budget import STANDARD, PrefillBudget, promise_of
from firstlight.scheduler.drafting import Drafting
from firstlight.scheduler.drafts import Drafter, accept
from firstlight.scheduler.fairness import ServedTokens
from firstlight.scheduler.intake import Intake
from firstlight.scheduler.joining import Joining
from firstlight.scheduler.limits import SchedulerLimits, SchedulerStats
from firstlight.scheduler.loading import Loading
from firstlight.scheduler.open_requests import OpenRequests
from firstlight.scheduler.state import RequestState, Status
from firstlight.scheduler.step import PlannedStep
from firstlight.scheduler.steptime import StepLoad, StepTimeModel
from firstlight.types import CoreRequest, FinishReason, RowResult, StepPlan, StepResult, TokenEvent

__all__ = ["Scheduler"]

AGE_TOKENS_PER_S = 500.0
"""Prefill order is remaining tokens + this * arrival time + what its tenant got beyond the least served one: a request
with R tokens left is overtaken only by requests of its class that arrive within R / AGE_TOKENS_PER_S seconds after it,
or (R + fairness.MAX_EXCESS_TOKENS) / AGE_TOKENS_PER_S where other tenants are active."""


class Scheduler:
    """Continuous batching over one KV cache. `plan`, run the plan, `absorb`; `add` and `abort` only between steps.

    Each request has known tokens (prompt and output) and computed tokens; every step closes part of the gap.
    Streams (gap 1) come first; prefill chunks take what is left of the time the streams were promised.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: SchedulerLimits,
        *,
        clock: Callable[[], float],
        step_time: StepTimeModel,
        drafter: Drafter | None = None,
        requests: OpenRequests | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.step_time = step_time
        self.stats = SchedulerStats()
        self._clock = clock
        self._open = requests or OpenRequests()
        self._drafting = Drafting(cache, limits, step_time, self._open, drafter)
        self._ended_ids: list[str] = []
        self._step: PlannedStep | None = None
        self._num_added = 0
        self._absorbed_s: float | None = None
        """When the last step's result came."""
        self._budget = PrefillBudget(limits, step_time)
        self._admission = Admission(cache, limits)
        self._intake = Intake(cache, limits, step_time, self._admission, self._open)
        self._served = ServedTokens()
        self._loading = Loading(cache, step_time)
        self._joining = Joining(
            cache, limits, self._open, admission=self._admission, loading=self._loading, served=self._served
        )

    # -- intake ---------------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """The most tokens, prompt and output, one request can reach."""
        return self._intake.capacity_tokens

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: not yet admitted, or preempted."""
        return len(self._open.waiting)

    @property
    def num_running(self) -> int:
        return self._open.num_running

    @property
    def has_work(self) -> bool:
        return bool(self._open.states)

    def validate(self, request: CoreRequest) -> None:
        """Refuses what could never be served. Reads constants only, so any thread may call it. Raises RequestError."""
        self._intake.validate(request)

    def refuse_if_full(self, num_ahead: int) -> None:
        """Raises OverloadedError when `num_ahead` requests wait and the queue, by number or seconds, holds no more."""
        self._intake.refuse_if_full(num_ahead)

    def predicted_wait_s(self) -> float:
        """Predicted seconds until a request that came now would be admitted and computed. Any thread."""
        return self._intake.predicted_wait_s()

    def retry_after_s(self) -> float:
        """`predicted_wait_s` as a client is told it, inside 1..120."""
        return self._intake.retry_after_s()

    def add(self, request: CoreRequest) -> None:
        """Queues a request. Raises RequestError (never servable, or the id is open) or OverloadedError."""
        self.validate(request)
        self.refuse_if_full(self.num_waiting)
        if request.request_id in self._open.states:
            raise RequestError(f"request id {request.request_id!r} is in use: send another", param="request_id")
        # whoever wants something of every token of its prompt needs every one to be computed
        is_shared = request.pooling != "mean" and request.prompt_logprobs is None
        state = RequestState(request, self.cache.table(request.request_id, request.cache_salt, is_shared=is_shared))
        state.max_tokens = min(request.max_tokens, self.capacity_tokens - state.num_prompt)
        remaining = state.num_prompt - len(self.cache.peek(state.table, state.tokens)) * self.cache.block_size
        self.cache.awaits(state.table)
        self._num_added += 1
        state.rank = (request.priority, 1, remaining + AGE_TOKENS_PER_S * request.arrival_s, self._num_added)
        self._served.opened(request.tenant)
        self._open.add(state)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request wherever it stands and frees its blocks; None if it is not open."""
        assert self._step is None, "abort between plan and absorb"
        state = self._open.states.get(request_id)
        if state is None:
            return None
        self.stats.aborted[state.status.value] += 1
        return self._end(state, FinishReason.ABORT)

    def fail(self, request_id: str, message: str) -> TokenEvent | None:
        """Ends a request with finish "error" and frees its blocks; None if it is not open."""
        assert self._step is None, "fail between plan and absorb"
        state = self._open.states.get(request_id)
        return None if state is None else self._end(state, FinishReason.ERROR, error=message)

    def fail_all(self, message: str) -> list[TokenEvent]:
        """Ends every open request with finish "error"; a step in flight is forgotten."""
        self._step = None
        return [self._end(state, FinishReason.ERROR, error=message) for state in list(self._open.states.values())]

    def drop_expired(self) -> list[TokenEvent]:
        """Ends requests that waited past their deadline, before any of their work is done. Call it before `plan`."""
        now, events = self._clock(), []
        for state in self._open.waiting.expired(now):
            waited_s = now - state.request.arrival_s
            message = (
                f"the request waited {waited_s * 1e3:.0f} ms and was not started before its deadline: send it again "
                "later, or with a larger `deadline_ms`"
            )
            self.stats.expired += 1
            events.append(self._end(state, FinishReason.ERROR, error=message, error_code=DeadlineError.code))
        return events

    @property
    def is_loading(self) -> bool:
        """After a `plan` of None: blocks are on their way up, and who loads them will say when to plan again."""
        return self._loading.is_loading

    @property
    def wake_at_s(self) -> float | None:
        """After a `plan` of None with requests open: when to plan again, unless something comes in before."""
        times = [t for t in (self._joining.wake_at_s, self._open.waiting.next_deadline_s()) if t is not None]
        return min(times, default=None)

    # -- plan -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None when no request is open or a batch still fills. Mutates: admits, preempts, allocates."""
        assert self._step is None, "plan before the last step was absorbed"
        if not self._open.states:
            return None
        now = self._clock()
        self.cache.expire_pins(now)
        self._loading.collect()
        self._joining.open_gate(now)
        while True:
            step = PlannedStep()
            self._secure_decode_blocks()
            self._plan_decodes(step)
            self._plan_prefills(step, now)
            if step.load.rows:
                break
            if self.num_running == 0:
                return None
            self._make_room()
        self._step = step
        self.stats.steps += 1
        ended, self._ended_ids = self._ended_ids, []
        copies = list(self._joining.copies.values())
        self._joining.copies.clear()
        return StepPlan(step_id=self.stats.steps, rows=step.rows, copy_blocks=copies, finished_ids=ended)

    def _secure_decode_blocks(self) -> None:
        """Gives each stream the block its next token needs; preempts where the pool is empty."""
        size = self.cache.block_size
        for state in list(self._open.decodes.values()):
            if state.num_computed < len(state.table.blocks) * size:
                continue
            while state.status is Status.DECODE and not self.cache.grow(state.table, state.num_computed + 1):
                self._make_room()

    def _plan_decodes(self, step: PlannedStep) -> None:
        """One row per stream, with the drafts that it checks."""
        wanted = self._drafting.begin()
        for state in self._open.decodes.values():
            drafts = wanted.get(state.id, [])
            step.add(state, [state.tokens[-1], *drafts], drafts)

    def _plan_prefills(self, step: PlannedStep, now: float) -> None:
        """Chunks in rank order, admitting on the way, while tokens, rows, blocks and the streams' time last."""
        num_decodes, decodes = len(step.rows), replace(step.load)
        self._budget.open(decodes, now, promise_of(self._open.most_urgent_stream(STANDARD)))
        candidates = self._joining.candidates(step)
        while True:
            is_first = len(step.rows) == num_decodes
            state = next(candidates, None) if self._budget.has_room(step.load, is_first=is_first) else None
            if state is None:
                break
            chunk = self._budget.chunk(step.load, state.num_computed, state.gap, is_first=is_first)
            if chunk == 0:
                break
            start, num_blocks = state.num_computed, len(state.table.blocks) + self.cache.num_free
            chunk = min(chunk, num_blocks * self.cache.block_size - start)
            if state.samples_every_token:
                chunk = min(chunk, step.spare_samples(self.limits))
            if chunk <= 0:
                step.refusal = step.refusal or "kv"
                continue
            self.cache.grow(state.table, start + chunk)
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now
            step.add_chunk(state, chunk)
        is_wanted = bool(self._open.prefills or self._open.waiting)
        self._budget.close(was_starved=is_wanted and len(step.rows) == num_decodes)

    # -- preemption -----------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Preempts one request; the only one that runs is left alone while loads or pins can be given up instead."""
        if self._loading.settle():
            return
        if self.num_running == 1 and (self._loading.cancel() or self.cache.give_up_pin()):
            return
        self._preempt(self._victim())

    def _victim(self) -> RequestState:
        return self._admission.victim(self._open.running())

    def _preempt(self, state: RequestState) -> None:
        """Takes its blocks; what it has said stays known and is computed again when it returns, first of its class."""
        if self._joining.copies.pop(state.id, None) is None:
            self.cache.publish_rest(state.table, state.tokens, state.num_computed)
        self.cache.release(state.table)
        self.cache.awaits(state.table)
        state.num_computed = 0
        state.tickets = []
        state.num_preemptions += 1
        self._open.preempt(state)
        self.stats.preemptions += 1

    # -- absorb ---------------------------------------------------------------------------------------------------

    def absorb(self, result: StepResult) -> list[TokenEvent]:
        """Takes a step's result: at most one event per request, the last one with `finish` set."""
        step = self._step
        assert step is not None, "absorb without a plan"
        assert result.step_id == self.stats.steps, f"result of step {result.step_id}, planned {self.stats.steps}"
        assert len(result.rows) == len(step.rows), f"{len(result.rows)} row results for {len(step.rows)} rows"
        self._step = None
        self._note_time(step, result.run_s)
        events = []
        for row, state, drafts, got in zip(step.rows, step.states, step.drafts, result.rows, strict=True):
            assert got.request_id == state.id
            if state.pool is not None and row.hidden_from >= 0:
                state.pool.add(row.start, got.hidden)
            if row.targets:
                state.prompt_logprobs += got.target_logprobs
            if row.sample_at:
                events.append(self._absorb_samples(state, drafts, len(row.token_ids) - len(drafts), got))
            else:
                self._advance(state, len(row.token_ids))
        return events

    def _note_time(self, step: PlannedStep, run_s: float) -> None:
        """Learns what the step took; every stream in it had its last token from the step before."""
        now, before = self._clock(), self._absorbed_s
        self._absorbed_s = now
        self._drafting.ran(step, run_s)
        if before is not None and not step.prefill_ids and step.num_drafts == 0:
            self._budget.ended(step.load, now - before, run_s, now)

    def _advance(self, state: RequestState, num: int) -> None:
        """Counts `num` more tokens as computed and publishes blocks that became full."""
        state.num_computed += num
        again = max(0, min(num, state.high_water - state.num_computed + num))
        state.high_water = max(state.high_water, state.num_computed)
        self.stats.recomputed_tokens += again
        if state.status is Status.PREFILL:
            self.stats.prefill_tokens += num
            self._served.add(state.request.tenant, num - again, 0)
        self.cache.publish(state.table, state.tokens, state.num_computed)

    def _absorb_samples(self, state: RequestState, drafts: list[int], num_known: int, got: RowResult) -> TokenEvent:
        """Appends what was sampled up to the first rejected draft, or to the request's end."""
        sampled = state.forced(got.token_ids)
        accepted = accept(drafts, sampled)
        new, finish = state.cut_at_end(sampled[: accepted + 1])
        self._drafting.learned(state.id, new)
        state.tokens.extend(new)
        self._advance(state, num_known + len(new) - 1)
        self.stats.output_tokens += len(new)
        self._served.add(state.request.tenant, 0, len(new))
        if drafts:
            self.stats.draft_tokens += len(drafts)
            self.stats.accepted_tokens += len(new) - 1
            self.cache.trim(state.table, state.num_computed)
        if state.status is Status.PREFILL:
            self._pin(state)
        if finish is not None:
            return self._end(state, finish, new, got)
        if state.status is Status.PREFILL:
            self._open.stream(state)
        return self._event(state, new, got)

    def _pin(self, state: RequestState) -> None:
        """Pins what the request asked for, now that its prompt is computed."""
        for pin in state.request.pins:
            until_s = math.inf if pin.ttl_s is None else self._clock() + pin.ttl_s
            pinned = self.cache.pin(state.table, min(pin.num_tokens, state.num_prompt), until_s, state.request.tenant)
            state.pinned_tokens = max(state.pinned_tokens, pinned)

    def _end(
        self,
        state: RequestState,
        finish: FinishReason,
        token_ids: list[int] | None = None,
        got: RowResult | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> TokenEvent:
        """Forgets a request and frees its blocks; its last event."""
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.cache.publish_rest(state.table, state.tokens, state.num_computed)
        self._joining.copies.pop(state.id, None)
        self.cache.release(state.table)
        self._served.closed(state.request.tenant)
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._admission.ended(state)
        self._open.end(state)
        self._drafting.forget(state.id)
        self._ended_ids.append(state.id)
        self.stats.finished[finish.value] += 1
        return self._event(state, token_ids or [], got, finish, error, error_code)

    def _event(
        self,
        state: RequestState,
        token_ids: list[int],
        got: RowResult | None,
        finish: FinishReason | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> TokenEvent:
        num = len(token_ids)
        logits: Any = None if got is None or got.logits is None else got.logits[:num]
        first, state.was_reported = not state.was_reported, True
        return TokenEvent(
            request_id=state.id,
            token_ids=token_ids,
            logprobs=None if got is None or got.logprobs is None else got.logprobs[:num],
            logits=logits,
            finish=finish,
            error=error,
            error_code=error_code,
            cached_tokens=state.cached_tokens,
            cache=state.cache_report() if finish is not None else None,
            first_scheduled_s=state.first_scheduled_s if first else None,
            prompt_logprobs=state.prompt_logprobs if first and state.request.prompt_logprobs is not None else None,
            embedding=None if state.pool is None or got is None or finish is None else state.pool.vector(),
        )

    # -- what is going on -----------------------------------------------------------------------------------------

    @property
    def planned_load(self) -> StepLoad:
        """What the step between `plan` and `absorb` computes."""
        assert self._step is not None
        return self._step.load

    def planned_shares(self) -> tuple[StepShare, ...]:
        """Whose rows are in the step between `plan` and `absorb`."""
        assert self._step is not None
        return self._step.shares()

    def why_waiting(self) -> tuple[str, list[tuple[str, str]]]:
        """Why the queue is not in the planned step, and who in it waits for something else.

        "kv", "rows" or "batch": its first request could not be admitted; "order": it could, and other prompts fill the
        step; "capacity": the running streams leave no time for any; "": nobody waits. Something else is "prefix" (an
        equal one is being computed) or "load" (its KV comes from a lower tier). Cost: some 10 microseconds.
        """
        assert self._step is not None
        reason = self._joining.why_waiting(self._step)
        return reason, self._step.held if reason else []

    def check(self) -> None:
        """Audits requests, queues, tables and pool against each other. Raises AssertionError saying what is broken."""
        self._open.check(self.cache, self.capacity_tokens, is_between_steps=self._step is None)

    def unused_slots(self) -> int:
        """Token slots in held blocks that hold no token yet: at most one partial block per request, by design."""
        return sum(len(s.table.blocks) * self.cache.block_size - s.num_computed for s in self._open.running())
