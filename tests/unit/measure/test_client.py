"""The measuring client reads what servers send, however the bytes are cut."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import BackendError, ConfigError, FirstlightError, OverloadedError, RequestError
from firstlight.measure.client import ChunkedBody, Endpoint, EventStream, get_json, stream_events
from tests.unit.measure.canned_server import canned, chunked, response, sse_body

CONFORMANCE = Path(__file__).resolve().parents[2] / "data" / "sse_conformance.jsonl"
EVENTS = [{"text": "one"}, {"text": "zwei\n\ndrei"}, {"text": "\u00e9\U0001f642"}, {"n": 4}]
CHUNKED = "Transfer-Encoding: chunked\r\n"


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(place % (len(raw) + 1) for place in places)})
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


def test_event_stream_reads_every_conformance_case() -> None:
    cases = [json.loads(line) for line in CONFORMANCE.read_text(encoding="utf-8").splitlines()]
    assert len(cases) == 54
    for case in cases:
        chunks, wanted = [base64.b64decode(chunk) for chunk in case["chunks_b64"]], [e["data"] for e in case["events"]]
        whole = EventStream().feed(b"".join(chunks))
        assert [event.decode() for event in whole] == wanted, case["id"]
        stream = EventStream()
        assert [event for chunk in chunks for event in stream.feed(chunk)] == whole, case["id"]


@settings(max_examples=60, deadline=None)
@given(
    places=st.lists(st.integers(0, 2000), max_size=30), size=st.integers(1, 50), newline=st.sampled_from(["\n", "\r\n"])
)
def test_chunked_events_cut_anywhere_come_out_whole(places: list[int], size: int, newline: str) -> None:
    raw = chunked(sse_body(EVENTS).replace(b"\n\n", newline.encode() * 2), size)
    body, events, out = ChunkedBody(), EventStream(), []
    for piece in cut(raw, places):
        out += events.feed(body.feed(piece))
    assert body.is_ended
    whole = EventStream().feed(sse_body(EVENTS))
    assert out == whole
    assert len(whole) == len(EVENTS) + 1


def test_event_with_several_data_lines_is_joined_and_other_fields_are_skipped() -> None:
    raw = b"event: x\nid: 7\ndata: a\ndata:b\n: comment\n\n\n\ndata\n\ndata: c\n\n"
    assert EventStream().feed(raw) == [b"a\nb", b"", b"c"]


@pytest.mark.parametrize("raw", [b"zz\r\nabc", b"\r\n\r\n"])
def test_broken_chunk_size_raises(raw: bytes) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        ChunkedBody().feed(raw)


async def collect(answer: bytes, piece_bytes: int) -> tuple[list[dict[str, Any]], bytes]:
    async with canned(answer, piece_bytes=piece_bytes) as (server, endpoint):
        events = [event async for _, event in stream_events(endpoint, "/v1/x", {"a": 1})]
        return events, server.requests[0]


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_stream_over_a_socket_gives_every_event(piece_bytes: int, is_chunked: bool) -> None:
    body = sse_body(EVENTS)
    answer = response(chunked(body, 11), headers=CHUNKED) if is_chunked else response(body)
    events, request = asyncio.run(collect(answer, piece_bytes))
    assert events == EVENTS
    assert request.startswith(b"POST /base/v1/x HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in request
    assert request.endswith(b'\r\n\r\n{"a":1}')


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (response(b'{"error":{"message":"no such field"}}', status="400 Bad"), RequestError, "400: no such field"),
        (response(b"plain words", status="404 Not Found"), RequestError, "404: plain words"),
        (response(b"", status="503 Busy", headers="Retry-After: 7\r\n"), OverloadedError, "503"),
        (response(chunked(b'{"error":{"message":"boom"}}', 5), status="500 E", headers=CHUNKED), BackendError, "boom"),
        (response(sse_body(EVENTS, done=False)), BackendError, r"before \[DONE\]"),
        (b"SSH-2.0-x\r\n\r\n", BackendError, "does not speak HTTP"),
        (b"", BackendError, "broke off"),
    ],
)
def test_bad_answer_raises_with_the_servers_words(answer: bytes, kind: type[FirstlightError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        asyncio.run(collect(answer, 4096))
    if isinstance(caught.value, OverloadedError):
        assert (caught.value.retry_after_s, caught.value.status) == (7.0, 503)


def test_get_reads_json_of_any_framing() -> None:
    async def fetch(answer: bytes) -> Any:
        async with canned(answer, piece_bytes=3) as (_, endpoint):
            return await get_json(endpoint, "/v1/models")

    body = b'{"data":[1,2]}'
    for answer in (
        response(body),
        response(body, headers=f"Content-Length: {len(body)}\r\n"),
        response(chunked(body, 4), headers=CHUNKED),
    ):
        assert asyncio.run(fetch(answer)) == {"data": [1, 2]}


def test_nobody_listening_raises_config_error_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="nothing answers") as caught:
        asyncio.run(get_json(Endpoint("127.0.0.1", 9), "/"))
    assert "firstlight serve" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host", "http://host:80"),
        ("https://host/v1/", "https://host:443"),
        ("http://[::1]:8/api/v1", "http://[::1]:8/api"),
    ],
)
def test_address_is_read_as_people_write_it(url: str, shown: str) -> None:
    assert Endpoint.parse(url).url == shown


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h:99999"])
def test_address_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not an http address"):
        Endpoint.parse(url)


def test_key_is_not_shown_in_the_representation() -> None:
    assert "secret" not in repr(Endpoint.parse("h:1", "secret"))
