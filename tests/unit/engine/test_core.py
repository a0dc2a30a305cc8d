from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from firstlight.backend.fake import FakeBackend, StepCost
from firstlight.config import EngineConfig
from firstlight.engine.core import EngineCore
from firstlight.errors import BackendError, OverloadedError, RequestError
from firstlight.types import CoreRequest, FinishReason, SamplingParams, TokenEvent

WAIT_S = 120.0


def request(request_id: str, prompt: list[int] | None = None, max_tokens: int = 5) -> CoreRequest:
    return CoreRequest(
        request_id=request_id,
        prompt_ids=prompt or [1, 2, 3],
        params=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        arrival_s=0.0,
    )


class Listener:
    """Collects events, and lets a test wait for a request's end."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.num_calls = 0
        self._changed = threading.Condition()

    def __call__(self, events: list[TokenEvent]) -> None:
        with self._changed:
            self.num_calls += 1
            for event in events:
                self.events[event.request_id].append(event)
            self._changed.notify_all()

    def finish(self, request_id: str) -> TokenEvent:
        def ended() -> bool:
            return bool(self.events[request_id]) and self.events[request_id][-1].finish is not None

        with self._changed:
            assert self._changed.wait_for(ended, WAIT_S), f"{request_id} did not end"
        return self.events[request_id][-1]

    def ids(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.token_ids]


class Gate:
    """Lets a fake backend's steps through one at a time, or all."""

    def __init__(self) -> None:
        self.is_open = True
        self._permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def __call__(self, seconds: float) -> None:
        if not self.is_open:
            self.entered.release()
            assert self._permits.acquire(timeout=WAIT_S)

    def close(self) -> None:
        self.is_open = False

    def await_step(self) -> None:
        """Returns once a step is inside the backend."""
        assert self.entered.acquire(timeout=WAIT_S)

    def let_one_through(self) -> None:
        self._permits.release()

    def open(self) -> None:
        self.is_open = True
        self._permits.release(10_000)


def started(listener: Listener, backend: FakeBackend | None = None, **config: int) -> EngineCore:
    core = EngineCore(backend or FakeBackend(), EngineConfig(**config), listener)  # type: ignore[arg-type]
    core.start()
    return core


def gated(**options: int) -> tuple[FakeBackend, Gate]:
    gate = Gate()
    return FakeBackend(cost=StepCost(step_s=1e-6), sleep=gate, **options), gate  # type: ignore[arg-type]


def test_core_many_requests_each_end_once_and_nothing_leaks() -> None:
    listener = Listener()
    core = started(listener, FakeBackend(num_blocks=40, block_size=4))
    core.submit([request(f"r{i}", [i] * (1 + i % 30), 1 + i % 9) for i in range(60)])
    for i in range(60):
        assert listener.finish(f"r{i}").finish is FinishReason.LENGTH
        assert len(listener.ids(f"r{i}")) == 1 + i % 9
    core.check().result(WAIT_S)
    stats = core.stats()
    assert (stats.waiting, stats.running, stats.cache.free_blocks) == (0, 0, 40)
    core.stop()


def test_core_one_call_per_step_carries_every_event_of_it() -> None:
    listener, (backend, gate) = Listener(), gated()
    core = started(listener, backend)
    gate.close()
    core.submit([request(f"r{i}", max_tokens=1) for i in range(8)])
    gate.open()
    for i in range(8):
        listener.finish(f"r{i}")
    assert listener.num_calls == core.stats().scheduler.steps
    core.stop()


def test_core_warm_up_leaves_no_trace_but_a_step_time_model() -> None:
    listener = Listener()
    core = started(listener)
    stats = core.stats()
    assert stats.scheduler.steps == 0
    assert stats.cache.lookups == stats.cache.cached_blocks == 0
    assert core.step_time.num_observed > 5
    assert not listener.events
    core.stop()


def test_core_warm_up_fits_the_smallest_backend() -> None:
    backend = FakeBackend(num_blocks=1, block_size=2, max_step_rows=1, max_step_tokens=1)
    core = started(Listener(), backend, max_queue=1)
    core.stop()


def test_core_step_records_say_what_ran() -> None:
    listener = Listener()
    core = started(listener)
    core.submit([request("r", [1] * 20, 3)])
    listener.finish("r")
    records = list(core.traces.steps)
    assert [record.tokens for record in records] == [20, 1, 1]
    assert [record.step_id for record in records] == [1, 2, 3]
    assert all(min(r.plan_s, r.run_s, r.absorb_s, r.predicted_s) > 0 for r in records)
    core.stop()


def test_core_backend_failure_ends_every_request_and_later_ones_are_refused() -> None:
    listener, (backend, gate) = Listener(), gated()
    core = started(listener, backend)
    backend._fail_at_step = backend.num_runs + 2
    gate.close()
    core.submit([request("a", max_tokens=9), request("b", [5] * 40, 9)])
    gate.await_step()
    core.submit([request("queued")])
    gate.open()
    for request_id in ("a", "b", "queued"):
        event = listener.finish(request_id)
        assert event.finish is FinishReason.ERROR
        assert event.error is not None
        assert "fail_at_step" in event.error
    assert core.failed is not None
    core.check().result(WAIT_S)
    assert core.stats().cache.free_blocks == backend.info.num_blocks
    with pytest.raises(BackendError, match="has failed"):
        core.submit([request("late")])
    core.stop()


def test_core_failing_warm_up_raises_and_can_be_stopped() -> None:
    core = EngineCore(FakeBackend(fail_at_step=2), EngineConfig(), Listener())
    with pytest.raises(BackendError, match="fail_at_step"):
        core.start()
    core.stop()
    core.check().result(WAIT_S)


def test_core_submit_is_all_or_nothing() -> None:
    listener = Listener()
    core = started(listener, max_queue=3)
    with pytest.raises(OverloadedError):
        core.submit([request(f"r{i}") for i in range(4)])
    with pytest.raises(RequestError, match="in use"):
        core.submit([request("same"), request("same")])
    with pytest.raises(RequestError, match="no tokens"):
        core.submit([request("fine"), CoreRequest(**{**_fields(request("bad")), "prompt_ids": []})])
    core.submit([request("fine")])
    listener.finish("fine")
    assert set(listener.events) == {"fine"}
    core.stop()


def _fields(one: CoreRequest) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_core_id_can_be_used_again_after_its_end() -> None:
    listener = Listener()
    core = started(listener)
    for _ in range(2):
        core.submit([request("r")])
        listener.finish("r")
        listener.events.clear()
    core.stop()


def test_core_queue_bound_counts_what_is_still_in_the_inbox() -> None:
    listener, (backend, gate) = Listener(), gated()
    core = started(listener, backend, max_queue=2)
    gate.close()
    core.submit([request("running", max_tokens=9)])
    gate.await_step()
    core.submit([request("w1")])
    core.submit([request("w2")])
    with pytest.raises(OverloadedError) as caught:
        core.submit([request("w3")])
    assert caught.value.status == 429
    assert core.stats().waiting == 2
    gate.open()
    for request_id in ("running", "w1", "w2"):
        listener.finish(request_id)
    core.stop()


def test_core_abort_takes_effect_before_the_next_step() -> None:
    listener, (backend, gate) = Listener(), gated()
    core = started(listener, backend)
    gate.close()
    core.submit([request("r", max_tokens=100)])
    gate.await_step()
    core.abort(["r", "never heard of"])
    gate.let_one_through()
    event = listener.finish("r")
    assert event.finish is FinishReason.ABORT
    assert len(listener.ids("r")) <= 1
    gate.open()
    core.stop()


def test_core_drain_refuses_new_requests_and_ends_with_the_last_open_one() -> None:
    listener, (backend, gate) = Listener(), gated()
    core = started(listener, backend)
    gate.close()
    core.submit([request("r", max_tokens=9)])
    gate.await_step()
    drained = core.drain()
    with pytest.raises(OverloadedError) as caught:
        core.submit([request("late")])
    assert caught.value.status == 503
    assert not drained.done()
    gate.open()
    drained.result(WAIT_S)
    assert listener.events["r"][-1].finish is FinishReason.LENGTH
    core.stop()


def test_core_stop_aborts_what_is_open_and_answers_whoever_waits() -> None:
    listener, (backend, gate) = Listener(), gated()
    core = started(listener, backend)
    gate.close()
    core.submit([request("running", max_tokens=1000), request("other", max_tokens=1000)])
    gate.await_step()
    drained = core.drain()
    gate.open()
    core.stop()
    core.stop()
    assert listener.events["running"][-1].finish is FinishReason.ABORT
    assert listener.events["other"][-1].finish is FinishReason.ABORT
    drained.result(WAIT_S)
    core.check().result(WAIT_S)
    core.drain().result(WAIT_S)
    assert backend.is_closed


def test_core_idle_does_not_step() -> None:
    listener = Listener()
    core = started(listener)
    core.submit([request("r")])
    listener.finish("r")
    steps = core.stats().scheduler.steps
    core.check().result(WAIT_S)
    core.check().result(WAIT_S)
    assert core.stats().scheduler.steps == steps
    core.stop()
