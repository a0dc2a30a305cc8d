"""`priority` and `deadline_ms` through HTTP, batch modes through a server, and what the scheduler says in metrics."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx
import pytest

from firstlight.backend.fake import StepCost
from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer

NO_END = {"256": -100, "257": -100}


def ask(server: ServerThread, **fields: Any) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 2, "seed": 1, "logit_bias": NO_END, **fields}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=30)


@pytest.fixture(scope="module")
def narrow_server(start_server: StartServer) -> ServerThread:
    """One request at a time, 5 ms a token."""
    return start_server(engine={"max_step_rows": 1}, backend={"cost": StepCost(step_s=0.005)})


@pytest.mark.parametrize("priority", ["interactive", "standard", "batch", None])
def test_priority_changes_no_answer(server: ServerThread, priority: str | None) -> None:
    assert ask(server, priority=priority).json()["choices"] == ask(server).json()["choices"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("priority", "urgent", "interactive, standard, batch"),
        ("priority", 3, "wrong type"),
        ("deadline_ms", 0, "above 0"),
        ("deadline_ms", -5, "above 0"),
        ("deadline_ms", 1e12, "a day"),
        ("deadline_ms", "soon", "wrong type"),
    ],
)
def test_wrong_urgency_is_refused_by_name(server: ServerThread, field: str, value: object, says: str) -> None:
    answer = ask(server, **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_request_past_its_deadline_is_408_with_its_own_code(narrow_server: ServerThread, stream: bool) -> None:
    with httpx.stream(
        "POST",
        narrow_server.url + "/v1/completions",
        json={"prompt": "y", "max_tokens": 400, "stream": True, "ignore_eos": True, "logit_bias": NO_END},
        timeout=30,
    ) as first:
        lines = first.iter_lines()
        next(lines)
        late = ask(narrow_server, deadline_ms=1, stream=stream)
    assert "deadline_exceeded" in late.text
    if not stream:
        assert late.status_code == 408
        assert late.json()["error"]["type"] == "timeout_error"
        assert late.json()["error"]["param"] == "deadline_ms"
    metrics = httpx.get(narrow_server.url + "/metrics").text
    assert float(re.findall(r"firstlight_num_expired_total\{.*\} (.*)", metrics)[0]) >= 1


def test_queue_beyond_its_seconds_is_429_with_a_computed_time(start_server: StartServer) -> None:
    slow = start_server(
        engine={"max_step_rows": 1, "max_queue_s": 0.2}, backend={"cost": StepCost(step_s=0.005)}, keep_alive_s=0.05
    )
    body = {"prompt": "y", "max_tokens": 1500, "stream": True, "ignore_eos": True, "logit_bias": NO_END}
    with httpx.stream("POST", slow.url + "/v1/completions", json=body, timeout=30) as first:
        lines = first.iter_lines()
        next(lines)
        with httpx.stream("POST", slow.url + "/v1/completions", json=body, timeout=30) as second:
            assert second.status_code == 200, "an empty queue refuses nobody"
            third = ask(slow)
    assert third.status_code == 429
    assert int(third.headers["retry-after"]) >= 1
    assert "`max_queue_s` is 0.2" in third.json()["error"]["message"]


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_batch_modes_answer_as_continuous_does(start_server: StartServer, server: ServerThread, mode: str) -> None:
    batched = start_server(engine={"mode": mode, "batch_size": 3, "batch_wait_ms": 30.0})
    texts: dict[int, str] = {}

    def one(i: int) -> None:
        answer = ask(batched, prompt=f"p{i}", max_tokens=5 + i, temperature=1.0)
        texts[i] = answer.json()["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(7):
        alone = ask(server, prompt=f"p{i}", max_tokens=5 + i, temperature=1.0)
        assert texts[i] == alone.json()["choices"][0]["text"]


def test_metrics_say_how_well_steps_are_predicted(server: ServerThread) -> None:
    ask(server)
    metrics = httpx.get(server.url + "/metrics").text
    for name in ("step_time_error_ratio", "predicted_wait_seconds", "recomputed_tokens_total"):
        assert f"firstlight_{name}" in metrics
