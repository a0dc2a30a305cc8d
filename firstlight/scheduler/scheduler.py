"""The scheduler: what every request computes in the next step, and what the step's result means.

Pure: the clock is an argument, nothing is read from a device. Knows token ids and predicted seconds, no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from firstlight.cache import KVCache
from firstlight.errors import DeadlineError, OverloadedError, RequestError
from firstlight.measure.causes import StepShare
from firstlight.scheduler.admission import Admission
from firstlight.scheduler.budget import STANDARD, PrefillBudget, promise_of
from firstlight.scheduler.drafts import Drafter, accept
from firstlight.scheduler.fairness import ServedTokens
from firstlight.scheduler.forecast import Backlog, wait_s
from firstlight.scheduler.limits import SchedulerLimits, SchedulerStats
from firstlight.scheduler.loading import Loading
from firstlight.scheduler.modes import BatchGate
from firstlight.scheduler.state import RequestState, Status
from firstlight.scheduler.steptime import StepLoad, StepTimeModel
from firstlight.scheduler.waiting import WaitingQueue, rank_of
from firstlight.types import CoreRequest, FinishReason, RowResult, StepPlan, StepResult, StepRow, TokenEvent

__all__ = ["Scheduler"]

AGE_TOKENS_PER_S = 500.0
"""Prefill order is remaining tokens + this * arrival time + what its tenant got beyond the least served one: a request
with R tokens left is overtaken only by requests of its class that arrive within R / AGE_TOKENS_PER_S seconds after it,
or (R + fairness.MAX_EXCESS_TOKENS) / AGE_TOKENS_PER_S where other tenants are active."""
MAX_DRAFTS = 16
"""Draft tokens asked for per row and step."""
RETRY_AFTER_BOUNDS_S = (1.0, 120.0)


@dataclass(slots=True)
class _Step:
    """A step while it is planned, and until its result is absorbed."""

    load: StepLoad
    rows: list[StepRow]
    states: list[RequestState]
    drafts: list[list[int]]
    num_sampled: int = 0
    prefill_ids: set[str] = field(default_factory=set)
    refusal: str = ""
    """Why the first waiting request that was looked at was not admitted."""
    held: list[tuple[str, str]] = field(default_factory=list)
    """Waiting requests that are passed over, and whether for "prefix" or "load"."""


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
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.step_time = step_time
        self.stats = SchedulerStats()
        self.capacity_tokens = min(limits.max_model_len, cache.num_blocks * cache.block_size)
        """The most tokens, prompt and output, one request can reach."""
        self._clock = clock
        self._drafter = drafter
        self._states: dict[str, RequestState] = {}
        self._waiting = WaitingQueue()
        self._prefills: dict[str, RequestState] = {}
        self._decodes: dict[str, RequestState] = {}
        self._ended_ids: list[str] = []
        self._step: _Step | None = None
        self._num_added = 0
        self._budget = PrefillBudget(limits, step_time)
        self._admission = Admission(cache, limits)
        self._gate = BatchGate(limits)
        self._served = ServedTokens()
        self._copies: dict[str, tuple[int, int]] = {}
        """Per request admitted since the last step, the block to copy for it before the next one's rows run."""
        self._loading = Loading(cache, step_time)

    # -- intake ---------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: not yet admitted, or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefills) + len(self._decodes)

    @property
    def has_work(self) -> bool:
        return bool(self._states)

    @property
    def planned_load(self) -> StepLoad:
        """What the step between `plan` and `absorb` computes."""
        assert self._step is not None
        return self._step.load

    def planned_shares(self) -> tuple[StepShare, ...]:
        """Whose rows are in the step between `plan` and `absorb`."""
        step = self._step
        assert step is not None
        prefill_ids = step.prefill_ids
        return tuple(
            StepShare(row.request_id, row.start, len(row.token_ids), row.request_id in prefill_ids) for row in step.rows
        )

    def why_waiting(self) -> tuple[str, list[tuple[str, str]]]:
        """Why the queue is not in the planned step, and who in it waits for something else.

        "kv", "rows" or "batch": its first request could not be admitted; "order": it could, and other prompts fill the
        step; "capacity": the running streams leave no time for any; "": nobody waits. Something else is "prefix" (an
        equal one is being computed) or "load" (its KV comes from a lower tier). Cost: some 10 microseconds.
        """
        step = self._step
        assert step is not None
        if not self._waiting:
            return "", []
        if not step.refusal:
            first = next(iter(self._waiting))
            if self.num_running and not self._has_room(first, self.cache.peek(first.table, first.tokens)):
                step.refusal = "rows" if self.num_running >= self.limits.max_step_rows else "kv"
        return step.refusal or ("order" if step.prefill_ids else "capacity"), step.held

    def validate(self, request: CoreRequest) -> None:
        """Refuses what could never be served. Reads constants only, so any thread may call it. Raises RequestError."""
        num = len(request.prompt_ids)
        if num == 0:
            raise RequestError("`prompt` has no tokens: send at least one", param="prompt")
        if num + 1 > self.capacity_tokens:
            raise RequestError(
                f"`prompt` is {num} tokens, which with one output token exceeds the {self.capacity_tokens} tokens that "
                "context and KV memory allow: send a shorter prompt, or restart with a larger --max-model-len or "
                "--kv-memory-mb",
                param="prompt",
            )
        vocab = self.limits.vocab_size
        if not (min(request.prompt_ids) >= 0 and max(request.prompt_ids) < vocab):
            raise RequestError(f"`prompt` has a token id outside 0..{vocab - 1}: use this model's ids", param="prompt")
        if request.forced_ids and not (min(request.forced_ids) >= 0 and max(request.forced_ids) < vocab):
            raise RequestError(f"`forced_ids` has a token id outside 0..{vocab - 1}", param="forced_ids")
        if request.max_tokens < 1:
            raise RequestError(f"`max_tokens` is {request.max_tokens}: ask for at least 1", param="max_tokens")

    def refuse_if_full(self, num_ahead: int) -> None:
        """Raises OverloadedError when `num_ahead` requests wait and the queue, by number or seconds, holds no more."""
        limits = self.limits
        if num_ahead >= limits.max_queue:
            again_s = self.retry_after_s()
            raise OverloadedError(
                f"{num_ahead} requests wait, `max_queue` is {limits.max_queue}: try again in {again_s:.0f} s",
                retry_after_s=again_s,
            )
        if limits.max_queue_s == 0 or num_ahead == 0:
            return
        predicted_s = self.predicted_wait_s()
        if predicted_s > limits.max_queue_s:
            again_s = self._bounded_s(predicted_s - limits.max_queue_s)
            raise OverloadedError(
                f"a new request would wait about {predicted_s:.0f} s, `max_queue_s` is {limits.max_queue_s:g}: "
                f"try again in {again_s:.0f} s",
                retry_after_s=again_s,
            )

    def predicted_wait_s(self) -> float:
        """Predicted seconds until a request that came now would be admitted and computed. Any thread."""
        running = [*list(self._prefills.values()), *list(self._decodes.values())]
        output = [self._admission.expected_output(state) - state.num_output for state in running]
        mean_tokens = (self._waiting.tokens + sum(len(s.tokens) for s in running)) / max(1, len(self._states))
        mean_output = sum(output) / len(output) if output else self._waiting.mean_output
        blocks = self.cache.num_blocks_for(round(mean_tokens + mean_output) or 1)
        backlog = Backlog(
            prefill_tokens=self._waiting.tokens + sum(s.gap for s in running),
            num_open=len(self._waiting) + len(running),
            num_streams=len(self._decodes),
            most_running=max(1, min(self.limits.max_step_rows, self.cache.num_blocks // blocks)),
            mean_tokens=mean_tokens,
            mean_output=mean_output,
        )
        return wait_s(backlog, self.step_time)

    def retry_after_s(self) -> float:
        """`predicted_wait_s` as a client is told it, inside 1..120."""
        return self._bounded_s(self.predicted_wait_s())

    @staticmethod
    def _bounded_s(seconds: float) -> float:
        low, high = RETRY_AFTER_BOUNDS_S
        return max(low, min(high, seconds))

    def add(self, request: CoreRequest) -> None:
        """Queues a request. Raises RequestError (never servable, or the id is open) or OverloadedError."""
        self.validate(request)
        self.refuse_if_full(len(self._waiting))
        if request.request_id in self._states:
            raise RequestError(f"request id {request.request_id!r} is in use: send another", param="request_id")
        is_shared = request.pooling != "mean"  # which needs every token to be computed
        state = RequestState(request, self.cache.table(request.request_id, request.cache_salt, is_shared=is_shared))
        state.max_tokens = min(request.max_tokens, self.capacity_tokens - state.num_prompt)
        remaining = state.num_prompt - len(self.cache.peek(state.table, state.tokens)) * self.cache.block_size
        self._num_added += 1
        state.rank = (request.priority, 1, remaining + AGE_TOKENS_PER_S * request.arrival_s, self._num_added)
        self._states[state.id] = state
        self._served.opened(request.tenant)
        self._waiting.add(state)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request wherever it stands and frees its blocks; None if it is not open."""
        assert self._step is None, "abort between plan and absorb"
        state = self._states.get(request_id)
        if state is None:
            return None
        self.stats.aborted[state.status.value] += 1
        return self._end(state, FinishReason.ABORT)

    def fail(self, request_id: str, message: str) -> TokenEvent | None:
        """Ends a request with finish "error" and frees its blocks; None if it is not open."""
        assert self._step is None, "fail between plan and absorb"
        state = self._states.get(request_id)
        return None if state is None else self._end(state, FinishReason.ERROR, error=message)

    def fail_all(self, message: str) -> list[TokenEvent]:
        """Ends every open request with finish "error"; a step in flight is forgotten."""
        self._step = None
        return [self._end(state, FinishReason.ERROR, error=message) for state in list(self._states.values())]

    def drop_expired(self) -> list[TokenEvent]:
        """Ends requests that waited past their deadline, before any of their work is done. Call it before `plan`."""
        now, events = self._clock(), []
        for state in self._waiting.expired(now):
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
        times = [t for t in (self._gate.wake_at_s, self._waiting.next_deadline_s()) if t is not None]
        return min(times, default=None)

    # -- plan -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None when no request is open or a batch still fills. Mutates: admits, preempts, allocates."""
        assert self._step is None, "plan before the last step was absorbed"
        if not self._states:
            return None
        now = self._clock()
        self.cache.expire_pins(now)
        self._loading.collect()
        self._open_gate(now)
        while True:
            step = _Step(StepLoad(), [], [], [])
            self._secure_decode_blocks()
            self._plan_decodes(step)
            self._plan_prefills(step, now)
            if step.rows:
                break
            if self.num_running == 0:
                return None
            self._make_room()
        self._step = step
        self.stats.steps += 1
        ended, self._ended_ids = self._ended_ids, []
        copies, self._copies = list(self._copies.values()), {}
        return StepPlan(step_id=self.stats.steps, rows=step.rows, copy_blocks=copies, finished_ids=ended)

    def _open_gate(self, now: float) -> None:
        is_busy = self.num_running + self._waiting.num_returning > 0
        num_new = len(self._waiting) - self._waiting.num_returning
        oldest_s = None if is_busy else self._waiting.oldest_arrival_s()
        self._gate.open(now, num_new, oldest_s, is_busy=is_busy)

    def _secure_decode_blocks(self) -> None:
        """Gives each stream the block its next token needs; preempts where the pool is empty."""
        size = self.cache.block_size
        for state in list(self._decodes.values()):
            if state.num_computed < len(state.table.blocks) * size:
                continue
            while state.status is Status.DECODE and not self.cache.grow(state.table, state.num_computed + 1):
                self._make_room()

    def _plan_decodes(self, step: _Step) -> None:
        """One row per stream, with as many drafts as tokens are left for."""
        spare = self._max_draft_tokens(len(self._decodes))
        for state in self._decodes.values():
            drafts: list[int] = []
            if self._drafter is not None and spare > 0:
                drafts = self._draft(state, min(spare, MAX_DRAFTS))
                spare -= len(drafts)
            self._add_row(step, state, [state.tokens[-1], *drafts], drafts)

    def _spare_samples(self, step: _Step) -> int:
        """Sampled positions that one more row may take, when every row that may still come keeps one."""
        limits = self.limits
        samples = limits.max_step_samples or limits.max_step_tokens
        return samples - step.num_sampled - (limits.max_step_rows - len(step.rows) - 1)

    def _max_draft_tokens(self, num_decodes: int) -> int:
        """Drafts a step has room for: tokens that streams leave, samples that no row may need for itself."""
        limits = self.limits
        samples = limits.max_step_samples or limits.max_step_tokens
        return min(limits.max_step_tokens - num_decodes, samples - limits.max_step_rows)

    def _draft(self, state: RequestState, most: int) -> list[int]:
        """Drafts for one stream: never past its end, and only where blocks are free anyway."""
        assert self._drafter is not None
        most = min(most, state.max_tokens - state.num_output - 1)
        drafts = list(self._drafter(state.id, state.tokens, most))[:most] if most > 0 else []
        if not self.cache.grow(state.table, state.num_computed + 1 + len(drafts)):
            return []
        return drafts

    def _plan_prefills(self, step: _Step, now: float) -> None:
        """Chunks in rank order, admitting on the way, while tokens, rows, blocks and the streams' time last."""
        num_decodes, decodes = len(step.rows), replace(step.load)
        promise = promise_of(min((s.request.priority for s in self._decodes.values()), default=STANDARD))
        self._budget.open(decodes, now, promise)
        candidates = self._prefill_candidates(step)
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
            if state.pool is not None and state.pool.needs_every_token:
                chunk = min(chunk, self._spare_samples(step))
            if chunk <= 0:
                step.refusal = step.refusal or "kv"
                continue
            self.cache.grow(state.table, start + chunk)
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now
            self._add_row(step, state, state.tokens[start : start + chunk], [])
            step.prefill_ids.add(state.id)
        is_wanted = bool(self._prefills or self._waiting)
        is_calm = len(step.rows) == num_decodes
        self._budget.close(decodes, was_starved=is_wanted and is_calm, is_calm=is_calm)

    def _prefill_candidates(self, step: _Step) -> Iterator[RequestState]:
        """Running prefills and whoever can be admitted, best rank first; each is admitted when it is asked for."""
        prefills = sorted(self._prefills.values(), key=rank_of)
        waiting = self._waiting.ordered(self._served.excess) if self._waiting else []
        at = 0
        while prefills or at < len(waiting):
            if at == len(waiting) or (prefills and rank_of(prefills[0]) < rank_of(waiting[at])):
                yield prefills.pop(0)
                continue
            state = waiting[at]
            at += 1
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
                step.refusal = step.refusal or ("rows" if self.num_running >= self.limits.max_step_rows else "kv")
                at = len(waiting)  # nobody overtakes the one that does not fit
                continue
            yield state

    def _may_start(self, state: RequestState) -> bool:
        return state.status is Status.PREEMPTED or self._gate.has_room

    def _awaits_equal_prefix(self, state: RequestState) -> bool:
        """True while a request that is not less urgent computes the very block this one needs next."""
        key = state.awaited_key
        if key is None or self.cache.claimant(key) is None:
            hits = self.cache.peek(state.table, state.tokens)
            key = state.awaited_key = self.cache.first_missing_key(state.table, len(hits))
        owner = self._prefills.get((key and self.cache.claimant(key)) or "")
        return owner is not None and owner.request.priority <= state.request.priority

    def _awaits_load(self, state: RequestState) -> bool:
        """True while a tier brings blocks that this request, which has room otherwise, needs next."""
        if self.cache.tiering is None:
            return False
        has_room = state.is_loading or self._has_room(state, self.cache.peek(state.table, state.tokens))
        return self._loading.awaits(state, has_room=has_room)

    def _has_room(self, state: RequestState, hits: list[int]) -> bool:
        """Whether rows and blocks suffice: it must be able to run to its predicted end without taking blocks that
        running requests will need to theirs."""
        if self.num_running >= self.limits.max_step_rows:
            return False
        return self.num_running == 0 or self._admission.fits(
            state, hits, self._prefills.values(), self._decodes.values()
        )

    def _admit(self, state: RequestState) -> bool:
        """Starts a waiting request on its cached prefix; False when there is no room for it."""
        hits = self.cache.peek(state.table, state.tokens)
        if not self._has_room(state, hits):
            return False
        self._waiting.remove(state)
        state.num_computed = self.cache.adopt(state.table, state.tokens, hits)
        if (rest := self.cache.adopt_rest(state.table, state.tokens)) is not None:
            state.num_computed += rest[0]
            self._copies[state.id] = rest[1]
        if state.num_preemptions == 0:
            state.cached_tokens = state.high_water = state.num_computed
            state.cache_miss = self.cache.miss(state.table, len(hits))
            num_loaded = sum(ticket.num_loaded for ticket in state.tickets)
            state.loaded_tokens = min(num_loaded, len(hits)) * self.cache.block_size
            self._gate.started()
        state.status = Status.PREFILL
        self._prefills[state.id] = state
        return True

    def _add_row(self, step: _Step, state: RequestState, token_ids: list[int], drafts: list[int]) -> None:
        num_known = len(token_ids) - len(drafts)
        samples = state.num_computed + num_known == len(state.tokens)
        hidden_from = -1 if state.pool is None else state.pool.first_of(len(token_ids), is_last=samples)
        step.rows.append(
            StepRow(
                request_id=state.id,
                token_ids=token_ids,
                start=state.num_computed,
                block_table=state.table.blocks,
                sample_at=tuple(range(num_known - 1, len(token_ids))) if samples else (),
                sampling=state.sampling() if samples else None,
                return_logits=state.request.return_logits and samples,
                hidden_from=hidden_from,
            )
        )
        step.num_sampled += len(token_ids) - hidden_from if hidden_from >= 0 else len(step.rows[-1].sample_at)
        step.states.append(state)
        step.drafts.append(drafts)
        step.load.add(state.num_computed, len(token_ids))

    # -- preemption -----------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Preempts one request; the only one that runs is left alone while loads or pins can be given up instead."""
        if self._loading.settle():
            return
        if self.num_running == 1 and (self._loading.cancel() or self.cache.give_up_pin()):
            return
        self._preempt(self._victim())

    def _victim(self) -> RequestState:
        return self._admission.victim([*self._prefills.values(), *self._decodes.values()])

    def _preempt(self, state: RequestState) -> None:
        """Takes its blocks; what it has said stays known and is computed again when it returns, first of its class."""
        if self._copies.pop(state.id, None) is None:
            self.cache.publish_rest(state.table, state.tokens, state.num_computed)
        self.cache.release(state.table)
        self._prefills.pop(state.id, None)
        self._decodes.pop(state.id, None)
        state.num_computed = 0
        state.tickets = []
        state.num_preemptions += 1
        state.status = Status.PREEMPTED
        state.rank = (state.request.priority, 0, state.rank[2], state.rank[3])
        self._waiting.add(state)
        self.stats.preemptions += 1

    # -- absorb ---------------------------------------------------------------------------------------------------

    def absorb(self, result: StepResult) -> list[TokenEvent]:
        """Takes a step's result: at most one event per request, the last one with `finish` set."""
        step = self._step
        assert step is not None, "absorb without a plan"
        assert result.step_id == self.stats.steps, f"result of step {result.step_id}, planned {self.stats.steps}"
        assert len(result.rows) == len(step.rows), f"{len(result.rows)} row results for {len(step.rows)} rows"
        self._step = None
        self.step_time.observe(step.load, result.run_s)
        events = []
        for row, state, drafts, got in zip(step.rows, step.states, step.drafts, result.rows, strict=True):
            assert got.request_id == state.id
            if state.pool is not None and row.hidden_from >= 0:
                state.pool.add(row.start, got.hidden)
            if row.sample_at:
                events.append(self._absorb_samples(state, drafts, len(row.token_ids) - len(drafts), got))
            else:
                self._advance(state, len(row.token_ids))
        return events

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
            del self._prefills[state.id]
            state.status = Status.DECODE
            self._decodes[state.id] = state
        return self._event(state, new, got)

    def _pin(self, state: RequestState) -> None:
        """Pins what the request asked for, now that its prompt is computed."""
        for pin in state.request.pins:
            until_s = math.inf if pin.ttl_s is None else self._clock() + pin.ttl_s
            pinned = self.cache.pin(state.table, min(pin.num_tokens, state.num_prompt), until_s)
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
        if state.status in (Status.WAITING, Status.PREEMPTED):
            self._waiting.remove(state)
        self._prefills.pop(state.id, None)
        self._decodes.pop(state.id, None)
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.cache.publish_rest(state.table, state.tokens, state.num_computed)
        self._copies.pop(state.id, None)
        self.cache.release(state.table)
        self._served.closed(state.request.tenant)
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._admission.ended(state)
        state.status = Status.ENDED
        del self._states[state.id]
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
            embedding=None if state.pool is None or got is None or finish is None else state.pool.vector(),
        )

    # -- audit ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Audits requests, queues, tables and pool against each other. Raises AssertionError saying what is broken."""
        states = self._states
        self.cache.check(state.table for state in states.values())
        self._waiting.check()
        homes = [s.id for s in self._waiting] + list(self._prefills) + list(self._decodes)
        assert sorted(homes) == sorted(states), "open requests and queues disagree"
        for state in states.values():
            where = f"{state.id} ({state.status.value})"
            waits = state.status in (Status.WAITING, Status.PREEMPTED)
            assert waits == (state in self._waiting), f"{where} is in the wrong queue"
            assert (state.status is Status.PREFILL) == (state.id in self._prefills), f"{where} is in the wrong queue"
            assert 0 <= state.num_computed < len(state.tokens) <= self.capacity_tokens, f"{where}: token counts"
            assert state.num_computed <= len(state.table.blocks) * self.cache.block_size, f"{where}: blocks are missing"
            if self._step is None:
                spare = len(state.table.blocks) - self.cache.num_blocks_for(state.num_computed)
                assert spare == 0, f"{where} holds {spare} blocks that no computed token is in"
            assert not (waits and state.table.blocks), f"{where} holds blocks"
            if state.status is Status.DECODE:
                assert state.gap == 1, f"{where} has {state.gap} tokens to compute"
                assert state.num_output > 0, f"{where} has said nothing"
        if not states:
            free = self.cache.num_free + self.cache.num_pinned + self.cache.num_moving
            assert free == self.cache.num_blocks, "blocks are held while no request is open"

    def unused_slots(self) -> int:
        """Token slots in held blocks that hold no token yet: at most one partial block per request, by design."""
        running = [*self._prefills.values(), *self._decodes.values()]
        return sum(len(s.table.blocks) * self.cache.block_size - s.num_computed for s in running)
