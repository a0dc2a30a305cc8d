"""The core: one thread that owns scheduler, cache and backend, and runs plan, run, absorb while anything is open.

Knows token ids only. Everyone else holds an end of its inbox; what it has to say goes out in one call per step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from firstlight.backend.base import Backend, BackendInfo
from firstlight.cache import CacheStats, KVCache, make_policy
from firstlight.config import EngineConfig
from firstlight.engine.auditor import Auditor
from firstlight.engine.masks import MaskWorker
from firstlight.engine.recorder import StepRecorder
from firstlight.engine.tiers import attach_tiers
from firstlight.engine.warmup import warm_up
from firstlight.errors import BackendError, FirstlightError, OverloadedError, RequestError
from firstlight.measure.causes import TraceBook
from firstlight.scheduler import Drafter, Scheduler, SchedulerLimits, SchedulerStats, StepTimeModel
from firstlight.text.grammar import GrammarCompiler
from firstlight.types import CoreRequest, FinishReason, TokenEvent

__all__ = ["CoreStats", "EngineCore"]

log = logging.getLogger(__name__)

CLOSING_RETRY_S = 5.0
LOAD_WAIT_S = 0.1
"""The tiers' thread wakes the core when a load has been read; this is for batches and deadlines that are due."""
DEFAULT_PIN_SHARE = 1 / 8
"""Of the KV blocks, what pins may hold unless the operator says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStats:
    """Gauges and counters as of now. Each number is exact; together they may straddle a step."""

    waiting: int
    running: int
    unused_slots: int
    """Token slots in held blocks that hold nothing yet (fragmentation)."""
    last_progress_s: float
    """When the last step ended, on the core's monotonic clock; 0 before the first."""
    failed: str | None
    predicted_wait_s: float
    """How long a request that came now would wait, by the step-time model."""
    step_error: float
    """Mean relative error of the step-time model over the last steps."""
    run_s: float
    """What all steps took on the backend."""
    predicted_s: float
    """What they were predicted to take."""
    cache: CacheStats
    scheduler: SchedulerStats


class EngineCore:
    """Owns a backend from `start` to `stop`.

    Args:
        on_events: called on the core's thread, once per step and once per batch of aborts, with every event of it.
            It must return at once and not raise.
        clock: monotonic seconds; `CoreRequest.arrival_s` is on it.
        drafter: proposes draft tokens; none by default.
        grammars: compiles the grammars of constrained requests; without it they are refused.
        declared: prompts' beginnings whose cached blocks all tenants share.

    Threads: everything public may be called from any thread.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        on_events: Callable[[list[TokenEvent]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
        grammars: GrammarCompiler | None = None,
        declared: Sequence[Sequence[int]] = (),
    ) -> None:
        info = backend.info
        self._masks = MaskWorker(grammars) if grammars is not None else None
        self.failed: str | None = None
        self.traces = TraceBook()
        """What went on with each request, and the recent steps."""
        self.step_time = StepTimeModel()
        self.limits = SchedulerLimits.of(info, config)
        self.max_pinned = _max_pinned(info, config)
        """Blocks that pins may hold."""
        cache = KVCache(
            info.num_blocks,
            info.block_size,
            info.fingerprint,
            prefix_cache=config.prefix_cache,
            max_pinned=self.max_pinned,
            declared=declared,
            policy=make_policy(config.eviction, info.num_blocks),
        )
        attach_tiers(cache, backend, config, self.limits, on_read=self._wake)
        self._cache = cache
        self._auditor = Auditor(backend, cache, config.audit_share, self.limits.max_step_tokens, clock)
        self._scheduler = Scheduler(cache, self.limits, clock=clock, step_time=self.step_time, drafter=drafter)
        self._recorder = StepRecorder(self._scheduler, self.traces, info.num_threads)
        self._backend = backend
        self._on_events = on_events
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._intake_lock = threading.Lock()
        self._open_ids: set[str] = set()
        self._num_in_inbox = 0
        self._is_draining = False
        self._is_stopping = False
        self._has_ended = False
        self._is_abandoned = False
        self._idle_waiters: list[Future[None]] = []
        self._last_progress_s = 0.0
        self._num_tracers = 0

    # -- any thread -----------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and output, one request can reach: bounded by context and by KV memory."""
        return self._scheduler.capacity_tokens

    @property
    def is_running(self) -> bool:
        """Between `start` and `stop`."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_open(self) -> bool:
        """Requests are open."""
        return bool(self._open_ids)

    @property
    def last_progress_s(self) -> float:
        """When the last step ended, on the core's monotonic clock; 0 before the first."""
        return self._last_progress_s

    def start(self, *, warm: bool = True) -> None:
        """Warms up in the caller's thread, which also teaches the step-time model this machine, then starts the thread.

        Raises:
            BackendError: a warm-up step failed.
        """
        assert self._thread is None, "started twice"
        if warm:
            self._recorder.before_warm_up()
            warm_up(self._backend, self.limits, self.step_time, self._clock)
        self._thread = threading.Thread(target=self._serve, name="firstlight-core", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[CoreRequest]) -> None:
        """Queues all of the requests or none.

        Raises:
            RequestError: one could never be served, or its id is open.
            OverloadedError: the queue is full, by number or by predicted seconds, or the core is draining (503).
            BackendError: the core has failed.
        """
        for request in requests:
            self._scheduler.validate(request)
            if request.params.grammar is not None and self._masks is None:
                raise RequestError("this engine has no grammar compiler", param=request.params.grammar.field)
        with self._intake_lock:
            if self.failed is not None:
                raise BackendError(f"the engine has failed: {self.failed}")
            if self._is_draining:
                raise OverloadedError("the engine is shutting down", retry_after_s=CLOSING_RETRY_S, status=503)
            num_waiting = self._scheduler.num_waiting + self._num_in_inbox
            self._scheduler.refuse_if_full(num_waiting + len(requests) - 1)
            ids = [request.request_id for request in requests]
            if not self._open_ids.isdisjoint(ids) or len(set(ids)) < len(ids):
                raise RequestError(f"request id {ids[0]!r} is in use: send another", param="request_id")
            self._open_ids.update(ids)
            self._num_in_inbox += len(requests)
        self._inbox.put(lambda: self._take(requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends the requests before the next step; each that is still open gets its last event with finish "abort"."""
        self._inbox.put(lambda: self._abort(request_ids))  # no lock: a finaliser may call this on any thread

    def stats(self) -> CoreStats:
        """What is going on, without waiting for the core."""
        return CoreStats(
            waiting=self._scheduler.num_waiting + self._num_in_inbox,
            running=self._scheduler.num_running,
            unused_slots=self._scheduler.unused_slots(),
            last_progress_s=self._last_progress_s,
            failed=self.failed,
            predicted_wait_s=self._scheduler.predicted_wait_s(),
            step_error=self.step_time.mean_error,
            run_s=self.traces.run_s,
            predicted_s=self.traces.predicted_s,
            cache=self._scheduler.cache.stats(),
            scheduler=self._scheduler.stats.copy(),
        )

    def block_owners(self) -> bytes:
        """One byte per KV block, as `KVCache.owners` gives them."""
        return self._scheduler.cache.owners()

    def trace_ops(self, on: bool) -> None:
        """One more, or one less, wants to know how long each kind of op takes in every step."""
        self._inbox.put(lambda: self._trace_ops(on))

    def check(self) -> Future[None]:
        """Audits scheduler and cache between two steps; the future carries an AssertionError saying what is broken."""
        done: Future[None] = Future()

        def audit() -> None:
            try:
                self._scheduler.check()
            except AssertionError as error:
                done.set_exception(error)
            else:
                _resolve(done)

        self._post(audit)
        return done

    def drain(self) -> Future[None]:
        """Refuses new requests from now on; the future is done when the last open one has ended."""
        with self._intake_lock:
            self._is_draining = True
        done: Future[None] = Future()
        self._post(lambda: self._idle_waiters.append(done))
        return done

    def stop(self) -> None:
        """Aborts what is open, ends the thread, closes the backend. Blocks for the running step. Idempotent."""
        with self._intake_lock:
            self._is_draining = True
        thread = self._thread
        if self._is_abandoned:
            self._inbox.put(self._stop)  # should the step ever end
            return
        if thread is not None:
            self._inbox.put(self._stop)
            thread.join()
        else:
            self._end_service()
        if self._masks is not None:
            self._masks.close()
        self._cache.close(keep=self.failed is None)
        self._backend.close()

    def abandon(self, message: str) -> None:
        """Ends every open request with an error from outside, for a thread that is stuck in a step.

        What that thread still says is dropped. Its backend is not freed, because it may still be at work there.
        """
        with self._intake_lock:
            self.failed = message
            self._is_abandoned = self._has_ended = True
            ids = sorted(self._open_ids)
            self._open_ids.clear()
        log.error("core_abandoned error=%r open=%d", message, len(ids))
        self._on_events(
            [TokenEvent(request_id=id, token_ids=[], finish=FinishReason.ERROR, error=message) for id in ids]
        )
        self._resolve_idle()

    def _post(self, command: Callable[[], None]) -> None:
        """Has the core's thread run it; runs it here when that thread has ended."""
        with self._intake_lock:
            if not self._has_ended:
                self._inbox.put(command)
                return
        command()
        self._resolve_idle()

    # -- the core's thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Takes what is in the inbox, runs a step, again; sleeps in the inbox while nothing is open."""
        self._recorder.watch_threads()
        while not self._is_stopping:
            if not self._scheduler.has_work:
                self._resolve_idle()
                self._await_work()
            while not self._inbox.empty():  # this thread is the only one that takes
                self._inbox.get_nowait()()
            try:
                self._step()
            except Exception as error:  # the one boundary: whatever failed, every open request gets its end
                self._fail(error)

        self._end_service()

    def _await_work(self) -> None:
        """Sleeps until something is in the inbox; audits cached blocks meanwhile, a little of the time."""
        idle_since_s = self._clock()
        while self._inbox.empty() and not self._is_stopping:
            self._cache.spill_ahead()
            wait_s = self._auditor.wait_s(idle_since_s) if self.failed is None else None
            if wait_s is None:
                self._inbox.get()()
                return
            try:
                self._inbox.get(timeout=wait_s)()
                return
            except queue.Empty:
                pass
            try:
                self._auditor.audit()
            except Exception as error:
                self._fail(error)

    def _wake(self) -> None:
        """Has the core's thread look again; any thread."""
        self._inbox.put(_nothing)

    def _end_service(self) -> None:
        """Runs what is left in the inbox, so that nobody waits for an answer that never comes."""
        self._recorder.close()
        with self._intake_lock:
            self._has_ended = True
        while not self._inbox.empty():
            self._inbox.get_nowait()()
        self._resolve_idle()

    def _resolve_idle(self) -> None:
        while self._idle_waiters:
            _resolve(self._idle_waiters.pop())

    def _step(self) -> None:
        """One plan, run, absorb. Without a plan it waits for the inbox, at most until a batch is due to start."""
        start_s = self._clock()
        self._recorder.begin(start_s, self._last_progress_s)
        if expired := self._scheduler.drop_expired():
            self._emit(expired)
        plan = self._scheduler.plan()
        if plan is None:
            if self._scheduler.is_loading:
                self._wait_for_inbox(LOAD_WAIT_S)
            elif (wake_s := self._scheduler.wake_at_s) is not None:
                self._wait_for_inbox(max(0.0, wake_s - start_s))
            self._recorder.waited(start_s, self._clock())
            return
        if self._masks is not None:
            plan = self._masks.attach(plan)
        record = self._recorder.planned(start_s, self._clock())
        result = self._backend.run(plan)
        ran_s = self._clock()
        events = self._scheduler.absorb(result)
        if self._masks is not None and (failed := self._masks.absorb(events)):
            events = [self._failed(event, failed) for event in events]
        self._last_progress_s = self._clock()
        self._recorder.ended(result, record, ran_s=ran_s, end_s=self._last_progress_s)
        if events:
            self._emit(events)
        self._cache.spill_ahead()

    def _trace_ops(self, on: bool) -> None:
        self._num_tracers = max(0, self._num_tracers + (1 if on else -1))
        self._backend.trace_ops(self._num_tracers > 0)

    def _wait_for_inbox(self, seconds: float) -> None:
        try:
            self._inbox.get(timeout=seconds)()
        except queue.Empty:
            return

    def _take(self, requests: Sequence[CoreRequest]) -> None:
        refused = []
        for request in requests:
            try:
                if self.failed is not None:
                    raise BackendError(f"the engine has failed: {self.failed}")
                self._scheduler.add(request)
                self.traces.taken(request.request_id, self._clock())
                if self._masks is not None:
                    self._masks.open(request)
            except FirstlightError as error:
                event = TokenEvent(
                    request_id=request.request_id, token_ids=[], finish=FinishReason.ERROR, error=error.message
                )
                refused.append(event)
        with self._intake_lock:
            self._num_in_inbox -= len(requests)
        if refused:
            self._emit(refused)

    def _abort(self, request_ids: Sequence[str]) -> None:
        events = [event for id in request_ids if (event := self._scheduler.abort(id)) is not None]
        if events:
            self._emit(events)

    def _stop(self) -> None:
        self._abort(sorted(self._open_ids))
        self._is_stopping = True

    def _fail(self, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        log.error("core_failed error=%r step=%d", message, self._scheduler.stats.steps, exc_info=error)
        with self._intake_lock:
            self.failed = message
        self._emit(self._scheduler.fail_all(message))

    def _failed(self, event: TokenEvent, failed: dict[str, str]) -> TokenEvent:
        """The event, or the error in its place: what was sampled without a mask is never shown. Mutates: ends it."""
        error = failed.get(event.request_id)
        if error is None:
            return event
        self._scheduler.fail(event.request_id, error)  # nothing to end where the event was its last
        return TokenEvent(
            request_id=event.request_id,
            token_ids=[],
            finish=FinishReason.ERROR,
            error=error,
            error_code=RequestError.code,
        )

    def _emit(self, events: list[TokenEvent]) -> None:
        if self._is_abandoned:
            return
        ended = [event.request_id for event in events if event.finish is not None]
        if ended:
            self.traces.ended(ended, self._clock())
            if self._masks is not None:
                self._masks.forget(ended)
            with self._intake_lock:
                self._open_ids.difference_update(ended)
        self._on_events(events)


def _nothing() -> None:
    """What the inbox gets where there is only something to look at."""


def _max_pinned(info: BackendInfo, config: EngineConfig) -> int:
    if config.pin_memory_mb:
        return min(info.num_blocks, config.pin_memory_mb * 1_000_000 // info.kv_bytes_per_block)
    return int(DEFAULT_PIN_SHARE * info.num_blocks)


def _resolve(future: Future[None]) -> None:
    """Marks it done, unless whoever waited for it has given up."""
    if future.set_running_or_notify_cancel():
        future.set_result(None)
