"""When a stream's tokens leave: gathered, or played out evenly. The text is the same to the byte in every way."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from firstlight.backend.fake import StepCost
from firstlight.server.pace import Pacing, Playout, paced
from firstlight.server.pieces import Piece
from firstlight.server.run import ServerThread
from firstlight.types import FinishReason
from tests.server.conftest import StartServer
from tests.server.raw import assert_idle_and_whole, connected, events, read_until, request_bytes

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 40, "logit_bias": {"256": -100, "257": -100}, "seed": 5}
FOREVER = Pacing(min_tokens=1000)


def gained(text: str, finish: FinishReason | None = None, choice: int = 0) -> Piece:
    return Piece(choice, text, None, 1, finish)


async def source(pieces: list[Piece], error: Exception | None = None) -> AsyncGenerator[list[Piece]]:
    for piece in pieces:
        yield [piece]
        await asyncio.sleep(0)
    if error is not None:
        raise error


def collected(pieces: list[Piece], pacing: Pacing) -> list[list[Piece]]:
    async def run() -> list[list[Piece]]:
        return [batch async for batch in paced(source(pieces), pacing)]

    return asyncio.run(run())


def test_first_text_leaves_at_once_and_the_rest_in_frames_of_the_interval() -> None:
    pieces = [gained(""), *(gained(letter) for letter in "abcdefg"), gained("", FinishReason.STOP)]
    batches = collected(pieces, Pacing(min_tokens=3))
    texts = [piece.text for batch in batches for piece in batch]
    assert "".join(texts) == "abcdefg"
    assert [text for text in texts if text] == ["a", "bcd", "efg"]
    assert batches[-1][-1].finish is FinishReason.STOP


def test_end_is_not_held_for_more_tokens() -> None:
    batches = collected([gained("a"), gained("b"), gained("c", FinishReason.LENGTH)], FOREVER)
    assert [piece.text for batch in batches for piece in batch] == ["a", "bc"]


def test_choices_are_held_apart() -> None:
    pieces = [gained("a", choice=0), gained("A", choice=1), gained("b", choice=0), gained("B", choice=1)]
    pieces += [gained("c", FinishReason.STOP, choice=0), gained("C", FinishReason.STOP, choice=1)]
    batches = collected(pieces, Pacing(min_tokens=2))
    for choice, wanted in ((0, "abc"), (1, "ABC")):
        assert "".join(p.text for batch in batches for p in batch if p.choice == choice) == wanted


@pytest.mark.parametrize("pacing", [FOREVER, Pacing(coalesce_s=60), Pacing(playout_s=0.05)])
def test_what_was_held_leaves_before_a_failure(pacing: Pacing) -> None:
    texts: list[str] = []

    async def read() -> None:
        async for batch in paced(source([gained("a"), gained("b")], RuntimeError("broken")), pacing):
            texts.extend(piece.text for piece in batch)

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(read())
    assert "".join(texts) == "ab"


def test_leaving_closes_the_source() -> None:
    async def run() -> None:
        closed = asyncio.Event()

        async def endless() -> AsyncGenerator[list[Piece]]:
            try:
                while True:
                    yield [gained("a")]
                    await asyncio.sleep(0)
            finally:
                closed.set()

        stream = paced(endless(), FOREVER)
        await anext(stream)
        await stream.aclose()
        assert closed.is_set()

    asyncio.run(run())


def bursts(seed: int) -> list[float]:
    """Arrival times of tokens 20 ms apart, of which one in eight comes 150 ms late with those behind it catching up."""
    source = random.Random(seed)
    times, at_s = [], 0.0
    while len(times) < 400:
        at_s += 0.02
        if source.random() < 0.125:
            late = source.randint(3, 7)
            times += [at_s + late * 0.02] * late
            at_s += late * 0.02
        else:
            times.append(at_s)
    return times


@pytest.mark.parametrize("seed", range(5))
def test_playout_evens_gaps_within_its_bound(seed: int) -> None:
    came = bursts(seed)
    playout = Playout(0.2)
    due = [playout.due_s(at_s, 1) for at_s in came]
    assert due[0] == came[0]
    assert all(0 <= out - into <= 0.2 + 1e-9 for into, out in zip(came, due, strict=True))
    assert due == sorted(due)
    gaps_in = [b - a for a, b in itertools.pairwise(came)]
    gaps_out = [b - a for a, b in itertools.pairwise(due)]
    usual_s = 0.02
    assert sum(gap > 2 * usual_s for gap in gaps_out) < sum(gap > 2 * usual_s for gap in gaps_in) / 2
    assert statistics.pstdev(gaps_out) < statistics.pstdev(gaps_in) / 2


@pytest.fixture(scope="module")
def gathering(start_server: StartServer) -> ServerThread:
    return start_server(backend={"cost": StepCost(step_s=0.002)}, stream_interval=8, coalesce_ms=500)


def streamed(server: ServerThread, **changes: Any) -> tuple[str, int]:
    """The text of a streamed answer, and the number of its frames with text."""
    answer = httpx.post(server.url + "/v1/completions", json={**BODY, "stream": True, **changes}, timeout=60)
    assert answer.status_code == 200, answer.text
    texts = [chunk["choices"][0]["text"] for chunk in events(answer.text)[:-1]]
    return "".join(texts), sum(bool(text) for text in texts)


def test_text_is_the_same_however_it_is_paced(slow_server: ServerThread, gathering: ServerThread) -> None:
    plain, num_plain = streamed(slow_server)
    for changes in ({}, {"logprobs": 2}, {"stop": ["\x00\x00"]}, {"n": 1, "pace_ms": 50}):
        assert streamed(slow_server, pace_ms=80, **{k: v for k, v in changes.items() if k != "pace_ms"})[0] == plain
        text, num_frames = streamed(gathering, **changes)
        assert text == plain
        assert num_frames < num_plain / 3


def test_pace_is_refused_out_of_range_and_without_a_stream(http: httpx.Client) -> None:
    for changes in ({"pace_ms": -1, "stream": True}, {"pace_ms": 2001, "stream": True}, {"pace_ms": 5}):
        answer = http.post("/v1/completions", json={**BODY, **changes})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "pace_ms"


def test_client_that_leaves_a_paced_stream_is_aborted(slow_server: ServerThread) -> None:
    sock = connected(slow_server)
    sock.sendall(request_bytes("/v1/completions", {**BODY, "max_tokens": 2000, "stream": True, "pace_ms": 500}))
    read_until(sock, b"data: ")
    steps = slow_server.engine.stats().scheduler.steps
    sock.close()
    assert_idle_and_whole(slow_server)
    assert slow_server.engine.stats().scheduler.steps - steps < 300, "it ran to its end"


def test_gaps_of_readers_are_counted(slow_server: ServerThread) -> None:
    streamed(slow_server)
    text = httpx.get(slow_server.url + "/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("firstlight_reader_gaps")]
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines}
    assert values["firstlight_reader_gaps_total"] >= 20
    assert values["firstlight_reader_gaps_long_total"] < values["firstlight_reader_gaps_total"] / 2
