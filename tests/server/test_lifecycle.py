"""Start, drain and stop: what clients see meanwhile."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from firstlight.backend.fake import StepCost
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.engine.load import EngineParts
from firstlight.errors import ConfigError, ModelError
from firstlight.server.run import ServerThread
from tests.server.raw import connected, events, read_all, read_until, request_bytes, wait_until

TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 100, "logit_bias": {"256": -100, "257": -100}}
COMPLETIONS = "/v1/completions"


def slow_thread(load: Callable[[EngineConfig], EngineParts] | None = None, **options: Any) -> ServerThread:
    """A server with 5 ms steps, not started."""
    config = EngineConfig(backend="fake")
    default = lambda config: fake_parts(config, cost=StepCost(step_s=0.005))  # noqa: E731
    return ServerThread(lambda: AsyncEngine(config, load=load or default), ServerConfig(port=0, **options))


def test_drain_finishes_open_requests_and_refuses_new_ones() -> None:
    with slow_thread() as server, httpx.Client(base_url=server.url) as kept:
        kept.get("/health")
        sock = connected(server)
        sock.sendall(request_bytes(COMPLETIONS, {**TEXT, "stream": True}))
        read_until(sock, b"data: ")
        server.request_stop()
        wait_until(lambda: not server.engine.ready, "the drain to begin")
        late = kept.post(COMPLETIONS, json=TEXT)
        assert late.status_code == 503
        assert int(late.headers["retry-after"]) >= 1
        assert kept.get("/ready").status_code == 503
        assert kept.get("/health").status_code == 200
        received = read_all(sock)
        assert b"[DONE]" in received
        assert server.join(20)
        sock.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_hurried", [False, True], ids=["deadline", "second stop"])
def test_drain_that_ends_early_tells_the_client(stream: bool, is_hurried: bool) -> None:
    with slow_thread(drain_s=60.0 if is_hurried else 0.05) as server:
        sock = connected(server)
        sock.sendall(request_bytes(COMPLETIONS, {**TEXT, "max_tokens": 2000, "stream": stream}))
        if stream:
            read_until(sock, b"data: ")
        wait_until(lambda: server.engine.stats().running == 1, "it to run")
        server.request_stop()
        if is_hurried:
            server.request_stop()
        received = read_all(sock)
        assert b"shutting down" in received
        assert b"[DONE]" not in received
        if not stream:
            assert received.startswith(b"HTTP/1.1 503")
        assert server.join(20)
        sock.close()


def test_server_answers_while_the_model_loads() -> None:
    gate = threading.Event()

    def load(config: EngineConfig) -> EngineParts:
        gate.wait(20)
        return fake_parts(config)

    server = slow_thread(load)
    with ThreadPoolExecutor(1) as pool:
        entered: Future[ServerThread] = pool.submit(server.__enter__)
        wait_until(lambda: server.url != "", "the socket")
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/ready").status_code == 503
        for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize"):
            answer = httpx.post(server.url + path, json=TEXT)
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
        assert httpx.get(server.url + "/v1/models").status_code == 503
        assert httpx.get(server.url + "/metrics").status_code == 503
        gate.set()
        entered.result(20)
        assert httpx.get(server.url + "/ready").status_code == 200
    server.__exit__()


def test_model_that_does_not_load_ends_the_server_with_its_error() -> None:
    def load(config: EngineConfig) -> EngineParts:
        raise ModelError("`model.gguf` is truncated")

    with pytest.raises(ModelError, match="truncated"):
        slow_thread(load).__enter__()


def test_address_that_cannot_be_bound_is_a_config_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for options in ({"port": taken.getsockname()[1]}, {"host": "no.such.host.invalid"}, {"port": 99999}):
            config = ServerConfig(**{"port": 0, **options})  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"listen|no address|`port`"):
                ServerThread(lambda: AsyncEngine(EngineConfig(backend="fake")), config).__enter__()


PROGRAM = """
from firstlight.backend.fake import StepCost
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.server.run import serve
load = lambda config: fake_parts(config, cost=StepCost(step_s=0.005))
serve(lambda: AsyncEngine(EngineConfig(backend="fake"), load=load), ServerConfig(port=0, drain_s=30))
print("stopped in order")
"""


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]], ids=["SIGTERM", "Ctrl-C twice"])
def test_process_stops_on_signals(signals: list[int]) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    log = ""
    while "event=ready" not in log:
        line = process.stderr.readline()
        assert line, f"ended early: {log}"
        log += line
    found = re.search(r"url=(\S+)", log)
    assert found
    stop_early = len(signals) == 2
    with httpx.stream(
        "POST", found[1] + COMPLETIONS, json={**TEXT, "stream": True, "max_tokens": 2000 if stop_early else 100}
    ) as answer:
        chunks = answer.iter_raw()
        body = next(chunks)
        for number in signals:
            process.send_signal(number)
            while "event=draining" not in log:  # two signals of a kind at once would be one
                log += process.stderr.readline()
        body += b"".join(chunks)
    assert (events(body)[-1] == "[DONE]") == (not stop_early)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output == "stopped in order\n"
    log += errors
    assert "Traceback" not in log
    requests = [line for line in log.splitlines() if "event=request" in line]
    assert len(requests) == 1
    for field in ("request_id=", "prompt_tokens=1 ", "queue_ms=", "ttft_ms=", "e2e_ms=", "finish="):
        assert field in requests[0]
