"""Streams under stress: a storm of disconnects, readers at 1 kB/s, the server's own part of each gap, a 1 MB prompt.

The server runs in this process and everything that talks to it in another, so that the server's own times can be read
exactly. The parts:

- storm: 1,000 streams at once; then the same 1,000, of which 500 are killed at random moments: in the queue, during
  prefill, between tokens. The texts of the other 500 must be equal to the byte.
- slow: 8 streams alone, beside 4 more, and beside 4 that read 1 kB/s, in turns.
- overhead: 16 streams; from a request's arrival until the core has it, and from the end of each step until its token is
  handed to the socket.
- tokenise: /health, asked 200 times a second with and without a 1 MB text being tokenised.

    python -m benchmarks.streams MODEL.gguf --part overhead --out benchmarks/results/streams-NAME.json
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import stream_clients
from benchmarks.document import conditions, write
from benchmarks.peers import memory_mb
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.frontend import AsyncEngine
from firstlight.server import run as server_run
from firstlight.server.app import App, create_app
from firstlight.server.asgi import Receive, Scope, Send

__all__ = ["Bench", "some_words", "spread", "stream_body"]

RSS_EVERY_S = 0.2
FOREVER_S = 3600.0
OPTIONS: dict[str, dict[str, Any]] = {
    "storm": {"prefix_cache": False},  # so that asking a second time is the same work
    "slow": {"num_blocks": 640},  # all of them touched in the first round, so that memory stands still after it
    "overhead": {},
    "tokenise": {},
}
PARTS = ("storm", "slow", "overhead", "tokenise")
Ask = Callable[..., Any]


class StampedApp:
    """The application, noting when each body write of a stream was handed over, by X-Request-Id."""

    def __init__(self, app: App) -> None:
        self.service = app.service
        self.writes: dict[str, list[float]] = {}
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        stamps = self.writes.setdefault(headers.get(b"x-request-id", b"").decode(), [])

        async def stamped(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                stamps.append(time.monotonic())

        await self._app(scope, receive, stamped)


class Bench:
    """The server in this process, and the other process that asks."""

    def __init__(self, args: argparse.Namespace, **options: Any) -> None:
        config = EngineConfig(model=str(args.model), threads=args.threads, **options)
        self.apps: list[StampedApp] = []
        server_run.create_app = self._stamped_app  # type: ignore[assignment,attr-defined]
        self.server = server_run.ServerThread(
            lambda: AsyncEngine(config), ServerConfig(port=0, served_model_name="model", idle_timeout_s=2)
        )
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_answer_calls, args=(theirs,), daemon=True)

    def _stamped_app(self, engine: AsyncEngine, config: ServerConfig) -> StampedApp:
        self.apps.append(StampedApp(create_app(engine, config)))
        return self.apps[-1]

    def __enter__(self) -> Bench:
        self._child.start()
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._child.join()
        self.server.__exit__()

    def ask(self, name: str, **options: Any) -> Any:
        """What the function of `stream_clients` gives, called in the other process with the server's address."""
        self._pipe.send((name, {"url": self.server.url, **options}))
        return self._pipe.recv()

    def ask_watched(self, name: str, **options: Any) -> tuple[Any, float]:
        """As `ask`; and the most memory this process, the server's, held meanwhile, in MB."""
        self._pipe.send((name, {"url": self.server.url, **options}))
        most_mb = 0.0
        while not self._pipe.poll(RSS_EVERY_S):
            most_mb = max(most_mb, memory_mb(os.getpid())["rss_mb"])
        return self._pipe.recv(), most_mb


def _answer_calls(pipe: Connection) -> None:
    """The other process: calls what it is told to until it is told nothing."""
    while (call := pipe.recv()) is not None:
        name, options = call
        pipe.send(asyncio.run(getattr(stream_clients, name)(**options)))


# -- the parts ----------------------------------------------------------------------------------------------------


def storm(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """All of `--streams` undisturbed; then again, and half of them are killed."""
    source = random.Random(args.seed)
    num = args.streams // 2
    texts = [some_words(source, source.randint(4, 24)) for _ in range(2 * num)]
    bodies = [stream_body(text, max_tokens=args.storm_tokens) for text in texts]
    undisturbed = bench.ask("crowd", bodies=bodies, kills=[None] * len(bodies))
    before, other = undisturbed[0::2], undisturbed[1::2]
    # By time alone nearly all would be killed in the queue, where streams spend most of it.
    by_time = [(source.uniform(0, stream["end_s"] / 2), args.storm_tokens) for stream in other]
    by_tokens = [(FOREVER_S, source.randint(1, args.storm_tokens - 1)) for _ in other]
    kills = [source.choice(pair) for pair in zip(by_time, by_tokens, strict=True)]
    mixed = [kill for pair in zip([None] * num, kills, strict=True) for kill in pair]
    both = bench.ask("crowd", bodies=bodies, kills=mixed)
    after, killed = both[0::2], both[1::2]
    changed = sum(a["text"] != b["text"] for a, b in zip(before, after, strict=True))
    audit = bench.ask("settled_audit")
    return {
        "streams": 2 * num,
        "killed": sum(stream["was_killed"] for stream in killed),
        "killed_before_their_first_token": sum(not stream["times_s"] for stream in killed),
        "failed": sum(stream["error"] is not None for stream in both),
        "texts_changed": changed,
        "audit": audit,
        "gaps_ms": {"undisturbed": _gaps(before), "storm": _gaps(after)},
    }


def _gaps(streams: Sequence[dict[str, Any]]) -> dict[str, float]:
    gaps_ms = [1e3 * gap_s for stream in streams for gap_s in stream["gaps_s"]]
    middle = statistics.median(gaps_ms)
    return {**spread(gaps_ms), "over_3x_median": sum(gap > 3 * middle for gap in gaps_ms), "num": len(gaps_ms)}


def slow(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """8 streams in three kinds of company, in turns; their gaps, and the server's memory."""
    company: dict[str, int | None] = {"alone": None, "beside 4": 0, "beside 4 at 1 kB/s": 1000}
    gaps_ms: dict[str, list[float]] = {name: [] for name in company}
    rss_mb: dict[str, list[float]] = {name: [] for name in company}
    read: list[int] = []
    source = random.Random(args.seed)
    for at in range(args.rounds + 1):
        for name, rate in company.items():
            beside = [
                stream_body(some_words(source, 16), max_tokens=1800, logprobs=5)
                for _ in range(0 if rate is None else 4)
            ]
            measured = [stream_body(some_words(source, 16), max_tokens=args.slow_tokens) for _ in range(8)]
            found, most_mb = bench.ask_watched("beside_readers", bodies=measured, beside=beside, bytes_per_s=rate or 0)
            if at == 0:
                continue
            gaps_ms[name] += [1e3 * gap_s for stream in found["streams"] for gap_s in stream["gaps_s"]]
            rss_mb[name].append(round(most_mb, 1))
            if rate:
                read.append(round(statistics.mean(found["bytes_read"]) / found["took_s"]))
    spreads = {name: spread(values) for name, values in gaps_ms.items()}
    return {
        "gaps_ms": spreads,
        "p99_slow_readers_to_brisk": round(spreads["beside 4 at 1 kB/s"]["p99"] / spreads["beside 4"]["p99"], 3),
        "p99_slow_readers_to_alone": round(spreads["beside 4 at 1 kB/s"]["p99"] / spreads["alone"]["p99"], 3),
        "bytes_per_s_read": read,
        "most_rss_mb": rss_mb,
        "audit": bench.ask("settled_audit"),
    }


def overhead(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """What passes outside the core: before it has a request, and between a step's end and the socket."""
    source = random.Random(args.seed)
    app = bench.apps[-1]
    to_core_ms: list[float] = []
    first_ms: list[float] = []
    later_ms: list[float] = []
    gap_ms: list[float] = []
    to_app_ms: list[float] = []
    num_merged = 0
    for at in range(args.rounds):
        ids = [f"overhead-{at}-{i}" for i in range(16)]
        bodies = [stream_body(some_words(source, 24), max_tokens=args.overhead_tokens) for _ in ids]
        sent = bench.ask("staggered", bodies=bodies, request_ids=ids, apart_s=args.apart_ms / 1e3)
        steps = bench.server.engine.step_records()
        for request_id, stream in zip(ids, sent, strict=True):
            found = app.service.finished.find(request_id)
            assert found is not None, stream["error"]
            stamps = found.stamps
            to_app_ms.append(1e3 * (stamps.arrival_s - stream["sent_s"]))
            to_core_ms.append(1e3 * (stamps.stages[-1][1] - stamps.arrival_s))
            core_id = found.traces[0].core_id
            mine = [step for step in steps if any(share.request_id == core_id for share in step.shares)]
            made_s = [step.end_s for step in mine if _samples(step, core_id, found.prompt_tokens)]
            left_s = app.writes[request_id]
            if len(left_s) != len(made_s) + 1:  # a write may carry several tokens; the last one has none
                num_merged += 1
                left_s = [left_s[min(len(left_s) - 1, bisect.bisect(left_s, end_s))] for end_s in made_s]
            lags = [1e3 * (left - made) for left, made in zip(left_s, made_s, strict=False)]
            first_ms.append(to_core_ms[-1] + lags[0])
            later_ms += lags[1:]
            gap_ms += [abs(b - a) for a, b in itertools.pairwise(lags)]
    return {
        "streams": 16 * args.rounds,
        "streams_with_merged_writes": num_merged,
        "client_sent_to_arrival_ms": spread(to_app_ms),
        "arrival_to_core_ms": spread(to_core_ms),
        "added_to_ttft_ms": spread(first_ms),
        "step_end_to_socket_ms": spread(later_ms),
        "moved_gap_by_ms": spread(gap_ms),
    }


def _samples(step: Any, core_id: str, num_prompt: int) -> bool:
    """The step gave the request a token: it computed its last known one."""
    return any(s.request_id == core_id and s.start + s.num_tokens >= num_prompt for s in step.shares)


def tokenise(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """/health with nothing else about, beside one 1 MB text being tokenised after another, and beside two at a time."""
    text = " ".join(some_words(random.Random(args.seed), 40) for _ in range(6000))[:1_000_000]
    result: dict[str, Any] = {"text_bytes": len(text.encode())}
    for name, num in (("quiet", 0), ("one text at a time", 1), ("two texts at a time", 2)):
        found = bench.ask("health_beside", text=text, num_texts=num, seconds=args.health_s)
        result[name] = {"health_ms": spread([1e3 * s for s in found["health_s"]]), "asked": len(found["health_s"])}
        if num:
            result[name] |= {"texts": found["num_texts"], "seconds_a_text": round(found["seconds_a_text"], 2)}
    quiet = result["quiet"]["health_ms"]["p99"]
    for name in ("one text at a time", "two texts at a time"):
        result[name]["p99_moved_ms"] = round(result[name]["health_ms"]["p99"] - quiet, 2)
    return result


def stream_body(prompt: str, *, max_tokens: int, **options: Any) -> dict[str, Any]:
    """A completions request for a stream of so many tokens."""
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "stream": True, **options}


def some_words(source: random.Random, num: int) -> str:
    """A prompt of `num` words, a token each."""
    words = "time year people way day man thing woman life child world school state family student group country"
    return " ".join(source.choices(words.split(), k=num))


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for name, share in at.items()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this; the file keeps the others")
    parser.add_argument("--streams", type=int, default=1000, help="in the storm")
    parser.add_argument("--storm-tokens", type=int, default=12, help="per stream")
    parser.add_argument("--slow-tokens", type=int, default=100, help="per measured stream")
    parser.add_argument("--overhead-tokens", type=int, default=64, help="per stream")
    parser.add_argument("--apart-ms", type=float, default=5.0, help="between arrivals, where the overhead is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--health-s", type=float, default=10.0, help="seconds of asking /health in each case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes; standard output without it")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    document: dict[str, Any] = {}
    if args.out is not None and args.out.exists():
        document = json.loads(args.out.read_text())
    measured = {"storm": storm, "slow": slow, "overhead": overhead, "tokenise": tokenise}
    for name in args.part or PARTS:
        with Bench(args, **OPTIONS[name]) as bench:
            bench.ask("crowd", bodies=[stream_body("warm up", max_tokens=8)] * 4, kills=[None] * 4)
            found = measured[name](bench, args)
        document[name] = {**conditions("benchmarks.streams", args.threads), "result": found}
        write(document, args.out)


if __name__ == "__main__":
    main()
