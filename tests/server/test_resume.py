"""Streams that are resumed by `Last-Event-ID`: nothing twice, nothing lost, nobody else's, not for ever."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest

from firstlight.backend.fake import StepCost
from firstlight.config import ServerConfig
from firstlight.server.asgi import ClientGone
from firstlight.server.resume import KeptStream, KeptStreams, NotResumable, Origin
from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import (
    assert_idle_and_whole,
    connected,
    dechunked,
    events,
    read_all,
    read_until,
    request_bytes,
    wait_until,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
OPTIONS: dict[str, Any] = {"seed": 5, "stream": True, "logit_bias": {"256": -100, "257": -100}}
SHORT: dict[str, Any] = {**OPTIONS, "prompt": "x", "max_tokens": 12}
LONG: dict[str, Any] = {**OPTIONS, "prompt": "x", "max_tokens": 1500}
TWO_CHOICES: dict[str, Any] = {
    **OPTIONS,
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 5,
    "n": 2,
    "logprobs": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def keeping(start_server: StartServer) -> ServerThread:
    """Keeps streams for longer than any test takes."""
    return start_server(backend={"cost": StepCost(step_s=0.002)}, resume_s=100.0, keep_alive_s=0.05)


@pytest.fixture(scope="module")
def forgetful(start_server: StartServer) -> ServerThread:
    """Keeps streams for a moment, with one row a step and two keys, of which one may do one thing at a time."""
    return start_server(
        engine={"max_step_rows": 1},
        backend={"cost": StepCost(step_s=0.005)},
        resume_s=0.2,
        keep_alive_s=0.05,
        api_key=("one", "two"),
        key_concurrency=1,
    )


def resume(server: ServerThread, last_id: str, body: Any = b"", *, path: str = COMPLETIONS, key: str = "") -> bytes:
    """What a client that comes back is answered, head and all."""
    headers = f"last-event-id: {last_id}\r\nconnection: close\r\nauthorization: Bearer {key}\r\n"
    with connected(server) as sock:
        sock.sendall(request_bytes(path, body, headers=headers))
        return read_all(sock)


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer that is an error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def whole_events(answer: bytes) -> list[bytes]:
    """Every event of a streamed answer that has arrived in full, id and all; comments left out."""
    body = dechunked(answer).replace(b": keep-alive\n\n", b"").replace(b": keep-alive\n", b"")
    return [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]


def id_of(event: bytes) -> str:
    """The id of an event."""
    first, _, rest = event.partition(b"\n")
    assert rest.startswith(b"data: "), event
    return first.removeprefix(b"id: ").decode()


def begun(server: ServerThread, body: Any, num_events: int = 1, *, path: str = COMPLETIONS, key: str = "") -> Any:
    """The socket of a stream, and its first events; fewer where tokens came together."""
    sock = connected(server)
    sock.sendall(request_bytes(path, body, headers=f"connection: close\r\nauthorization: Bearer {key}\r\n"))
    received = read_until(sock, b"data: ")
    while len(whole_events(received)) < num_events and (more := sock.recv(65536)):
        received += more
    return sock, whole_events(received)[:num_events]


def kill(sock: socket.socket) -> None:
    """Closes with a TCP reset, as a killed process does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def text_of(received: list[bytes]) -> str:
    """The joined text of a completion's events."""
    assert received[-1].endswith(b"data: [DONE]\n\n")
    return "".join(event["choices"][0]["text"] for event in events(b"".join(received))[:-1])


def test_stream_that_may_be_resumed_numbers_its_events(keeping: ServerThread, server: ServerThread) -> None:
    received = whole_events(httpx_stream(keeping, SHORT))
    answer_id = events(received[0])[0]["id"]
    assert [id_of(event) for event in received] == [f"{answer_id}/{at + 1}" for at in range(len(received))]
    plain = whole_events(httpx_stream(server, SHORT))
    assert all(event.startswith(b"data: ") for event in plain)
    assert text_of(received) == text_of(plain)


def httpx_stream(server: ServerThread, body: Any) -> bytes:
    """A whole answer as it came."""
    with connected(server) as sock:
        sock.sendall(request_bytes(COMPLETIONS, body, headers="connection: close\r\n"))
        return read_all(sock)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, SHORT), (CHAT, TWO_CHOICES)], ids=["text", "chat"])
def test_stream_killed_at_any_event_is_resumed_to_the_byte(keeping: ServerThread, path: str, body: Any) -> None:
    at, num_events = 1, 2
    while at < num_events:
        sock, before = begun(keeping, body, at, path=path)
        kill(sock)
        after = whole_events(resume(keeping, id_of(before[-1]), body if at % 2 else b"", path=path))
        answer_id = id_of(before[0]).rpartition("/")[0]
        assert before + after == whole_events(resume(keeping, f"{answer_id}/0", path=path))
        assert (before + after)[-1].endswith(b"data: [DONE]\n\n")
        at, num_events = at + 1, len(before + after)
    assert num_events >= 7
    assert_idle_and_whole(keeping)


def test_stream_killed_again_and_again_is_resumed_to_the_byte(keeping: ServerThread) -> None:
    whole = text_of(whole_events(httpx_stream(keeping, {**LONG, "max_tokens": 300})))
    sock, received = begun(keeping, {**LONG, "max_tokens": 300}, 5)
    while not received[-1].endswith(b"[DONE]\n\n"):
        kill(sock)
        sock = connected(keeping)
        headers = f"last-event-id: {id_of(received[-1])}\r\nconnection: close\r\n"
        sock.sendall(request_bytes(COMPLETIONS, b"", headers=headers))
        received += whole_events(read_until(sock, b"data: ") + sock.recv(2000))
    sock.close()
    assert [int(id_of(event).rpartition("/")[2]) for event in received] == list(range(1, len(received) + 1))
    assert text_of(received) == whole


def test_stream_killed_in_the_queue_is_resumed_by_its_request_id(forgetful: ServerThread) -> None:
    first, _ = begun(forgetful, LONG, key="one")
    second = connected(forgetful)
    headers = "x-request-id: mine\r\nauthorization: Bearer two\r\n"
    second.sendall(request_bytes(COMPLETIONS, SHORT, headers=headers))
    wait_until(lambda: forgetful.engine.stats().waiting == 1, "the second to wait")
    kill(second)
    third = connected(forgetful)
    headers = "last-event-id: mine/0\r\nconnection: close\r\nauthorization: Bearer two\r\n"
    third.sendall(request_bytes(COMPLETIONS, SHORT, headers=headers))
    answer = read_until(third, b": keep-alive\n")
    kill(first)
    answer += read_all(third)
    assert text_of(whole_events(answer)) == text_of(whole_events(resume(forgetful, "mine/0", key="two")))
    third.close()
    assert_idle_and_whole_with_key(forgetful)


def assert_idle_and_whole_with_key(server: ServerThread) -> None:
    """As `assert_idle_and_whole`, where keys are needed."""
    stats = server.engine.stats
    wait_until(lambda: stats().waiting + stats().running == 0, "every request to end")
    counts = httpx.get(server.url + "/debug/check", headers={"authorization": "Bearer one"}).json()
    assert counts["status"] == "ok"
    assert counts["used_blocks"] == 0


def test_stream_left_for_too_long_is_aborted_and_gone(forgetful: ServerThread) -> None:
    sock, received = begun(forgetful, LONG, key="one")
    kill(sock)
    assert_idle_and_whole_with_key(forgetful)
    steps = forgetful.engine.stats().scheduler.steps
    assert steps < 1000, "it ran to its end"
    wait_until(
        lambda: error_of(resume(forgetful, id_of(received[-1]), key="one")) == (404, "not_resumable"), "it to be gone"
    )


def test_stream_of_another_key_is_not_found(keeping: ServerThread, start_server: StartServer) -> None:
    server = start_server(resume_s=100.0, api_key=("one", "two"))
    sock, received = begun(server, SHORT, key="one")
    kill(sock)
    last_id = id_of(received[-1])
    foreign, unknown = resume(server, last_id, key="two"), resume(server, "cmpl-0/1", key="two")
    assert error_of(foreign) == error_of(unknown) == (404, "not_resumable")
    name = last_id.rpartition("/")[0].encode()
    assert foreign.partition(b"\r\n\r\n")[2] == unknown.partition(b"\r\n\r\n")[2].replace(b"cmpl-0", name)
    assert error_of(resume(server, last_id, key="")) == (401, "invalid_api_key")
    assert whole_events(resume(server, last_id, key="one"))[-1].endswith(b"[DONE]\n\n")


def test_stream_that_is_left_keeps_its_part_of_the_quota(start_server: StartServer) -> None:
    server = start_server(backend={"cost": StepCost(step_s=0.005)}, resume_s=100.0, key_concurrency=1)
    sock, received = begun(server, LONG)
    kill(sock)
    assert httpx.post(server.url + COMPLETIONS, json=SHORT, timeout=60).status_code == 429
    name = id_of(received[-1]).rpartition("/")[0]
    assert httpx.post(server.url + "/v1/cancel", json={"id": name}).json()["cancelled"] == 1
    assert_idle_and_whole(server)
    rest = resume(server, id_of(received[-1]))
    assert events(dechunked(rest))[-1]["error"]["code"] == "cancelled"
    assert httpx.post(server.url + COMPLETIONS, json=SHORT, timeout=60).status_code == 200


def test_stream_with_two_readers_goes_on_with_the_second(keeping: ServerThread) -> None:
    first, received = begun(keeping, {**LONG, "max_tokens": 200}, 3)
    second = resume(keeping, id_of(received[-1]))
    assert whole_events(second)[-1].endswith(b"[DONE]\n\n")
    old = read_all(first)
    assert b"resumed_elsewhere" in old
    assert b"[DONE]" not in old
    first.close()


def test_stream_whose_end_was_read_can_be_read_again(keeping: ServerThread) -> None:
    received = whole_events(httpx_stream(keeping, SHORT))
    assert whole_events(resume(keeping, id_of(received[-2]))) == received[-1:]
    nothing_left = resume(keeping, id_of(received[-1]))
    assert nothing_left.startswith(b"HTTP/1.1 200")
    assert dechunked(nothing_left) == b""


def test_resume_of_what_is_not_there_is_refused_by_name(keeping: ServerThread, server: ServerThread) -> None:
    received = whole_events(httpx_stream(keeping, SHORT))
    name = id_of(received[-1]).rpartition("/")[0]
    assert error_of(resume(keeping, f"{name}/{len(received) + 1}")) == (404, "not_resumable")
    assert error_of(resume(keeping, f"{name}/1", path=CHAT)) == (404, "not_resumable")
    assert error_of(resume(keeping, f"{name}/1", {**SHORT, "seed": 6})) == (400, "invalid_request")
    for malformed in (name, f"{name}/", f"{name}/-1", "/1", f"{name}/" + "9" * 40):
        assert error_of(resume(keeping, malformed)) == (400, "invalid_request"), malformed
    assert error_of(resume(server, f"{name}/1")) == (400, "unsupported_parameter")


def kept_streams(*names: str, keep_s: float = 100.0) -> tuple[KeptStreams, list[KeptStream]]:
    """A shelf of 10 KB and open streams on it."""
    kept = KeptStreams(ServerConfig(resume_s=keep_s, resume_mb=0.01))
    origins = [Origin(answer_id=name, request_id="", salt=b"", path="/", body_digest=b"") for name in names]
    return kept, [kept.open(origin) for origin in origins]


async def write_events(stream: KeptStream, num_events: int) -> None:
    """An answer of so many events of some 100 bytes."""
    for at in range(num_events):
        await stream.write(b"data: " + b"x" * 80 + b"\n\n", is_last=at + 1 == num_events)


async def follow_all(stream: KeptStream, after: int, most_bytes: list[int], kept: KeptStreams) -> bytes:
    """Everything after an event, while what is kept is watched."""
    body = b""
    async with aclosing(stream.follow(after)) as batches:
        async for frames, _ in batches:
            body += frames
            most_bytes.append(kept.num_bytes)
    return body


def test_kept_stream_without_reader_waits_at_the_limit_and_loses_nothing() -> None:
    async def story() -> None:
        kept, (stream,) = kept_streams("a")
        writer = asyncio.create_task(stream.run(write_events(stream, 1000)))
        for _ in range(2000):
            await asyncio.sleep(0)
        assert 10_000 < kept.num_bytes < 10_200, "it waits for a reader once the limit is passed"
        most = [kept.num_bytes]
        body = await follow_all(stream, 0, most, kept)
        await writer
        assert body.count(b"data: ") == 1000
        numbers = [int(event.partition(b"\n")[0].removeprefix(b"id: a/")) for event in body.split(b"\n\n")[:-1]]
        assert numbers == list(range(1, 1001))
        assert max(most) < 10_400
        with pytest.raises(NotResumable):
            await follow_all(stream, 0, most, kept)
        assert (await follow_all(stream, 999, most, kept)).startswith(b"id: a/1000\n")
        kept.close()
        assert kept.num_bytes == 0

    asyncio.run(story())


def test_kept_streams_without_room_forget_the_ended_first() -> None:
    async def story() -> None:
        kept, (first, second, third) = kept_streams("a", "b", "c")
        for stream in (first, second, third):
            await stream.run(write_events(stream, 45))
            stream.close(None)
        with pytest.raises(NotResumable):
            kept.find("a", b"", "/")
        assert kept.find("b", b"", "/") is second
        assert kept.find("c", b"", "/") is third
        kept.close()

    asyncio.run(story())


def test_kept_stream_that_nobody_reads_is_ended_and_forgotten() -> None:
    async def story() -> None:
        kept, (stream,) = kept_streams("a", keep_s=0.01)
        with pytest.raises(ClientGone):
            await stream.run(write_events(stream, 1000))
        with pytest.raises(NotResumable):
            kept.find("a", b"", "/")
        assert kept.num_bytes == 0

    asyncio.run(story())


def test_stock_client_reads_events_with_ids_and_comments_between(start_server: StartServer) -> None:
    server = start_server(backend={"cost": StepCost(step_s=0.1)}, resume_s=100.0, keep_alive_s=0.02)
    raw = httpx_stream(server, {**SHORT, "max_tokens": 4})
    assert re.search(rb"\n\n(: keep-alive\n)+id: ", dechunked(raw)), "there is a comment after an event"
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        chunks = list(client.completions.create(model="fake", **{**SHORT, "max_tokens": 4}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(whole_events(raw))
