"""A core that fails or hangs: its requests end with an error, readiness says so, and a new core takes over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from firstlight.backend.fake import FakeBackend, StepCost
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.engine.load import EngineParts
from firstlight.server.run import ServerThread
from firstlight.types import StepPlan, StepResult
from tests.server.raw import wait_until

TEXT = {"prompt": "x", "seed": 3, "max_tokens": 8}
LONG = {"prompt": "x", "seed": 3, "max_tokens": 500, "ignore_eos": True}
ROUTE = "/v1/completions"


class HangingBackend(FakeBackend):
    """Hangs in the step that begins while `gate` is closed."""

    gate: threading.Event

    def run(self, plan: StepPlan) -> StepResult:
        self.gate.wait()
        return super().run(plan)


@contextmanager
def served(**config: float) -> Iterator[tuple[ServerThread, list[HangingBackend]]]:
    """A server, and every backend that was loaded for it."""
    backends: list[HangingBackend] = []

    def load(config: EngineConfig) -> EngineParts:
        parts = fake_parts(config)
        backend = HangingBackend(cost=StepCost(step_s=0.002))
        backend.gate = threading.Event()
        backend.gate.set()
        backends.append(backend)
        return EngineParts(
            backend=backend, tokenizer=parts.tokenizer, chat_template=parts.chat_template, model_name="fake"
        )

    engine_config = EngineConfig(backend="fake", **config)  # type: ignore[arg-type]
    with ServerThread(lambda: AsyncEngine(engine_config, load=load), ServerConfig(port=0)) as server:
        yield server, backends


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_failed_core_is_replaced_and_answers_as_before(stream: bool) -> None:
    with served() as (server, backends), httpx.Client(base_url=server.url) as http:
        before = http.post(ROUTE, json=TEXT).json()["choices"]
        backends[0]._fail_at_step = backends[0].num_runs + 20
        failed = http.post(ROUTE, json={**LONG, "stream": stream})
        assert '"code":"backend_error"' in failed.text
        assert "[DONE]" not in failed.text
        late = http.post(ROUTE, json=TEXT)
        assert late.status_code in (200, 503)
        wait_until(lambda: http.get("/ready").status_code == 200, "a new core")
        assert http.get("/health").status_code == 200
        assert http.post(ROUTE, json=TEXT).json()["choices"] == before
        assert len(backends) == 2
        assert backends[0].is_closed
        assert http.get("/debug/check").status_code == 200


def test_core_that_keeps_failing_is_given_up() -> None:
    with served(max_restarts=2) as (server, backends), httpx.Client(base_url=server.url) as http:
        for _ in range(3):
            wait_until(lambda: http.get("/ready").status_code == 200, "a core")
            backends[-1]._fail_at_step = 1
            assert http.post(ROUTE, json=LONG).status_code == 500
        wait_until(lambda: http.get("/health").status_code == 503, "the end")
        assert len(backends) == 3
        assert http.post(ROUTE, json=TEXT).status_code == 500


def test_wedged_core_is_found_and_replaced() -> None:
    """The step never ends; the client gets an error all the same, and what the old core says later reaches nobody."""
    with served(watchdog_s=0.3) as (server, backends), httpx.Client(base_url=server.url, timeout=20) as http:
        before = http.post(ROUTE, json=TEXT).json()["choices"]
        with ThreadPoolExecutor(2) as pool:
            backends[0].gate.clear()
            stuck = [pool.submit(http.post, ROUTE, json=LONG) for _ in range(2)]
            for answer in (future.result(20) for future in stuck):
                assert answer.status_code == 500
                assert "no step has ended" in answer.json()["error"]["message"]
        wait_until(lambda: http.get("/ready").status_code == 200, "a new core")
        backends[0].gate.set()
        assert http.post(ROUTE, json=TEXT).json()["choices"] == before
        assert len(backends) == 2


def test_idle_core_is_not_wedged() -> None:
    with served(watchdog_s=0.15) as (server, backends):
        threading.Event().wait(0.6)
        assert httpx.post(server.url + ROUTE, json=TEXT).status_code == 200
        assert len(backends) == 1


def test_stop_during_a_hang_ends_the_server() -> None:
    with served(watchdog_s=0.2) as (server, backends), ThreadPoolExecutor(1) as pool:
        backends[0].gate.clear()
        stuck = pool.submit(httpx.post, server.url + ROUTE, json=LONG, timeout=20)
        assert stuck.result(20).status_code == 500
        server.request_stop()
        assert server.join(20)
