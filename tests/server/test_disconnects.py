"""Clients that leave or do not read: their request ends within a step, nobody else notices, nothing is leaked."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from firstlight.backend.fake import StepCost
from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import (
    assert_idle_and_whole,
    connected,
    dechunked,
    events,
    read_all,
    read_briskly,
    read_until,
    request_bytes,
    vanish,
    wait_until,
)

NO_END = {"256": -100, "257": -100}
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 2000, "logit_bias": NO_END}
COMPLETIONS = "/v1/completions"


def running(server: ServerThread) -> int:
    """Requests that take part in steps."""
    return server.engine.stats().running


def reset(sock: socket.socket) -> None:
    """Closes with a TCP reset, as a killed process does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.fixture(scope="module")
def narrow_server(start_server: StartServer) -> ServerThread:
    """One row a step, so that a second request waits."""
    return start_server(engine={"max_step_rows": 1}, backend={"cost": StepCost(step_s=0.005)}, keep_alive_s=0.05)


@pytest.mark.parametrize("close", [socket.socket.close, reset], ids=["fin", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_leaves_during_decode_is_aborted(slow_server: ServerThread, stream: bool, close: Any) -> None:
    sock = connected(slow_server)
    sock.sendall(request_bytes(COMPLETIONS, {**LONG, "stream": stream}))
    wait_until(lambda: running(slow_server) == 1, "decode to begin")
    if stream:
        read_until(sock, b"data: ")
    steps = slow_server.engine.stats().scheduler.steps
    close(sock)
    assert_idle_and_whole(slow_server)
    assert slow_server.engine.stats().scheduler.steps - steps < 300, "it ran to its end"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_leaves_in_the_queue_is_aborted(narrow_server: ServerThread, stream: bool) -> None:
    first, second = connected(narrow_server), connected(narrow_server)
    first.sendall(request_bytes(COMPLETIONS, LONG))
    wait_until(lambda: running(narrow_server) == 1, "the first to run")
    second.sendall(request_bytes(COMPLETIONS, {**LONG, "stream": stream}))
    wait_until(lambda: narrow_server.engine.stats().waiting == 1, "the second to wait")
    second.close()
    wait_until(lambda: narrow_server.engine.stats().waiting == 0, "the second to be aborted")
    assert running(narrow_server) == 1
    first.close()
    assert_idle_and_whole(narrow_server)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_leaves_during_prefill_is_aborted(start_server: StartServer, stream: bool) -> None:
    server = start_server(engine={"max_step_tokens": 16}, backend={"cost": StepCost(step_s=0.01)})
    sock = connected(server)
    sock.sendall(request_bytes(COMPLETIONS, {"prompt": "x" * 1900, "max_tokens": 5, "stream": stream}))
    wait_until(lambda: running(server) == 1, "prefill to begin")
    steps = server.engine.stats().scheduler.steps
    sock.close()
    assert_idle_and_whole(server)
    assert server.engine.stats().scheduler.steps - steps < 1900 // 16


def test_client_that_leaves_before_its_body_is_complete_changes_nothing(server: ServerThread) -> None:
    whole = request_bytes(COMPLETIONS, LONG)
    for at in (1, 20, whole.index(b"\r\n\r\n") + 4, len(whole) - 1):
        sock = connected(server)
        sock.sendall(whole[:at])
        sock.close()
    assert_idle_and_whole(server)


def test_client_that_leaves_one_of_many_choices_ends_all(slow_server: ServerThread) -> None:
    sock = connected(slow_server)
    body = {**LONG, "prompt": ["a", "b"], "n": 3, "stream": True, "max_tokens": 300}
    sock.sendall(request_bytes(COMPLETIONS, body))
    wait_until(lambda: running(slow_server) == 6, "six choices to run")
    sock.close()
    assert_idle_and_whole(slow_server)


def test_queued_stream_gets_comments_then_its_answer(narrow_server: ServerThread) -> None:
    first, second = connected(narrow_server), connected(narrow_server)
    first.sendall(request_bytes(COMPLETIONS, {**LONG, "max_tokens": 60}))
    wait_until(lambda: running(narrow_server) == 1, "the first to run")
    second.sendall(
        request_bytes(COMPLETIONS, {**LONG, "max_tokens": 2, "stream": True}, headers="connection: close\r\n")
    )
    received = read_all(second).decode()
    assert received.startswith("HTTP/1.1 200")
    comments, _, answer = received.partition("data: ")
    assert comments.count(": keep-alive\n\n") >= 2
    assert events("data: " + answer)[-1] == "[DONE]"
    first.close()
    second.close()
    assert_idle_and_whole(narrow_server)


def test_error_before_the_first_byte_keeps_its_status_when_streaming(server: ServerThread) -> None:
    answer = httpx.post(server.url + COMPLETIONS, json={**LONG, "prompt": "", "stream": True})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_reader_that_stops_reading_is_cut_and_others_are_not(wide_server: ServerThread) -> None:
    sock = connected(wide_server, receive_buffer=4096)
    body = {**LONG, "max_tokens": 3_000, "stream": True, "logprobs": 20}
    sock.sendall(request_bytes(COMPLETIONS, body))
    read_until(sock, b"data: ")
    brisk = httpx.post(wide_server.url + COMPLETIONS, json={**LONG, "max_tokens": 50}, timeout=60)
    assert brisk.json()["usage"]["completion_tokens"] == 50
    wait_until(lambda: _slow_readers(wide_server) == 1, "the stream to be ended")
    read_briskly(sock)
    rest = read_all(sock)
    error = events(rest[rest.rindex(b"data: ") :].split(b"\r\n")[0])[-1]["error"]
    assert error["code"] == "slow_reader"
    assert b"[DONE]" not in rest
    sock.close()
    assert_idle_and_whole(wide_server)


def test_slow_but_steady_reader_is_not_cut(wide_server: ServerThread) -> None:
    sock = connected(wide_server, receive_buffer=4096)
    body = {**LONG, "max_tokens": 1_500, "stream": True, "logprobs": 20}
    before = _slow_readers(wide_server)
    sock.sendall(request_bytes(COMPLETIONS, body, headers="connection: close\r\n"))
    received = read_until(sock, b"data: ")
    for _ in range(60):  # some 3 s, six times what the server allows; far less is read than waits
        received += sock.recv(1024)
        time.sleep(0.05)
    read_briskly(sock)
    received += read_all(sock)
    chunks = events(dechunked(received))
    assert chunks[-1] == "[DONE]"
    assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks[:-1]) == 1_500
    assert _slow_readers(wide_server) == before
    sock.close()
    assert_idle_and_whole(wide_server)


def test_reader_of_one_byte_at_a_time_gets_its_answer(slow_server: ServerThread) -> None:
    body = {**LONG, "max_tokens": 30, "seed": 3}
    whole = httpx.post(slow_server.url + COMPLETIONS, json=body).json()["choices"][0]["text"]
    sock = connected(slow_server, receive_buffer=2048)
    sock.sendall(request_bytes(COMPLETIONS, {**body, "stream": True}, headers="connection: close\r\n"))
    received = b""
    while byte := sock.recv(1):
        received += byte
    chunks = events(dechunked(received))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole
    assert chunks[-1] == "[DONE]"
    sock.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_whose_machine_vanished_is_aborted(start_server: StartServer, stream: bool) -> None:
    server = start_server(backend={"cost": StepCost(step_s=0.02)}, dead_peer_s=2.0, keep_alive_s=0.1)
    sock = connected(server)
    sock.sendall(request_bytes(COMPLETIONS, {**LONG, "stream": stream}))
    if stream:
        read_until(sock, b"data: ")
    wait_until(lambda: running(server) == 1, "decode to begin")
    vanish(sock)
    assert_idle_and_whole(server)
    assert server.engine.stats().scheduler.steps < 1_000, "it ran to its end"
    sock.close()


def test_slow_reader_gets_merged_frames_and_the_same_answer(start_server: StartServer) -> None:
    wide_server = start_server(backend={"num_blocks": 512, "max_model_len": 4096})
    # With the log-probabilities an answer is megabytes however its frames were merged on the way: no buffer holds it.
    body = {**LONG, "max_tokens": 3_000, "seed": 1, "logprobs": 20}
    whole = httpx.post(wide_server.url + COMPLETIONS, json=body, timeout=120).json()["choices"][0]["text"]
    sock = connected(wide_server, receive_buffer=2048)
    sock.sendall(request_bytes(COMPLETIONS, {**body, "stream": True}, headers="connection: close\r\n"))
    head = read_until(sock, b"data: ")
    wait_until(lambda: wide_server.engine.stats().running == 0, "the engine to finish without its reader")
    read_briskly(sock)
    chunks = [event for event in events(dechunked(head + read_all(sock))) if event != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert max(len(chunk["choices"][0]["text"]) for chunk in chunks) > 100
    sock.close()


@pytest.fixture(scope="module")
def wide_server(start_server: StartServer) -> ServerThread:
    """Long answers, and little patience with readers."""
    return start_server(backend={"num_blocks": 512, "max_model_len": 4096}, slow_reader_s=0.5)


def _slow_readers(server: ServerThread) -> float:
    text = httpx.get(server.url + "/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("firstlight_slow_readers_total{"))
    return float(line.split()[-1])


def test_many_clients_with_random_disconnects_leave_nothing_behind(start_server: StartServer) -> None:
    server = start_server(
        engine={"max_step_rows": 16}, backend={"num_blocks": 200, "cost": StepCost(step_s=0.0005)}, keep_alive_s=0.05
    )
    rng = random.Random(11)
    plans = [
        (rng.choice(["x", "a shared beginning " * 8, "y" * rng.randint(1, 600)]), rng.randint(1, 60), rng.random())
        for _ in range(300)
    ]

    address = urlsplit(server.url)

    async def one(prompt: str, max_tokens: int, luck: float) -> str:
        body = {**LONG, "prompt": prompt, "max_tokens": max_tokens, "stream": luck < 0.7, "n": 2 if luck < 0.1 else 1}
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(request_bytes(COMPLETIONS, body, headers="connection: close\r\n"))
            async with asyncio.timeout(luck * 0.2 if luck < 0.35 else 60):
                received = await reader.read(-1)
        except TimeoutError:
            return "left"
        finally:
            writer.close()
        assert received.startswith(b"HTTP/1.1 200"), received
        if body["stream"]:
            assert events(dechunked(received))[-1] == "[DONE]"
        return "done"

    async def all_of_them() -> list[str]:
        room = asyncio.Semaphore(64)

        async def admitted(plan: tuple[str, int, float]) -> str:
            async with room:
                return await one(*plan)

        return await asyncio.gather(*(admitted(plan) for plan in plans))

    outcomes = asyncio.run(all_of_them())
    assert len(outcomes) == 300
    assert outcomes.count("done") >= 150
    assert outcomes.count("left") >= 20
    assert_idle_and_whole(server)
    wait_until(
        lambda: b'http_requests_open{model_name="fake"} 0.0' in httpx.get(server.url + "/metrics").content, "all closed"
    )
