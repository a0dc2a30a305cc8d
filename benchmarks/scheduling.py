"""What the scheduler promises, measured on the real model: stall, short behind long, pressure.

    python -m benchmarks.scheduling stall --out benchmarks/results/scheduling-stall.json
    python -m benchmarks.scheduling short
    python -m benchmarks.scheduling pressure

`stall` and `short` start `firstlight serve` and time what arrives at a client on the same machine. `pressure` drives
the engine's core in this process. Each prints one JSON object and exits 1 if its promise was not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from firstlight.config import EngineConfig
from firstlight.engine.core import EngineCore
from firstlight.engine.load import load_parts
from firstlight.measure.client import Endpoint, get_json, stream_events
from firstlight.types import CoreRequest, FinishReason, SamplingParams, TokenEvent

PROMPTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "prompts.jsonl"
WORDS = tuple(
    "the water of a small city and its old river in early light time people group music other story language day order "  # noqa: SIM905
    "number system work school point house family part word name line year way place hand side kind head form".split()
)
"""One token each with a space before them in the default model's vocabulary."""
TURNS = 2.0
EXTRA_S = 0.010


def percentile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` lies, between neighbours in proportion."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * q
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def words(rng: random.Random, num: int) -> str:
    """A prompt of about `num` tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(num))


# -- over HTTP ----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(options: Sequence[str]) -> AsyncIterator[Endpoint]:
    """A server process of its own, ready; ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "firstlight", "serve", *options, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    endpoint = Endpoint.parse(f"http://127.0.0.1:{port}")
    try:
        for _ in range(600):
            with contextlib.suppress(Exception):
                await get_json(endpoint, "/ready")
                break
            await asyncio.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait()


async def stream(endpoint: Endpoint, prompt: str, max_tokens: int, times: list[float] | None = None) -> dict[str, Any]:
    """One streamed completion: when it was sent, and when each piece arrived (in `times`, as it runs)."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    record: dict[str, Any] = {"sent": time.perf_counter(), "times": [] if times is None else times}
    async for at, event in stream_events(endpoint, "/v1/completions", body):
        if any(choice.get("text") for choice in event.get("choices", ())):
            record["times"].append(at)
    return record


def ttft(record: dict[str, Any]) -> float:
    first: float = record["times"][0]
    return first - float(record["sent"])


def gaps(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Gaps that lie between two moments or reach into the time between them."""
    return [b - a for a, b in pairwise(times) if b > begin and a < end]


class StolenTime:
    """When the hypervisor took a CPU away, as far as the kernel counts it: in ticks of 10 ms. 0 on bare machines."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []

    async def watch(self) -> None:
        """Samples until it is cancelled; some 50 microseconds each time."""
        while True:
            stat = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
            self._samples.append((time.perf_counter(), int(stat[8])))
            await asyncio.sleep(0.010)

    def ticks(self, begin: float, end: float) -> int:
        """Ticks that were counted between two moments, give or take a sample."""
        before = [ticks for at, ticks in self._samples if at <= begin]
        after = [ticks for at, ticks in self._samples if at >= end]
        return (after[0] if after else self._samples[-1][1]) - (before[-1] if before else self._samples[0][1])

    def share(self, begin: float, end: float) -> float:
        """Of all CPUs' time between two moments."""
        return self.ticks(begin, end) / os.sysconf("SC_CLK_TCK") / (end - begin) / (os.cpu_count() or 1)

    def untouched(self, times: Sequence[float], begin: float, end: float) -> list[float]:
        """`gaps` during which no CPU was stolen."""
        pairs = [(a, b) for a, b in pairwise(times) if b > begin and a < end]
        return [b - a for a, b in pairs if self.ticks(a, b) == 0]


async def stall(args: argparse.Namespace) -> dict[str, Any]:
    """`--streams` streams decode, a long prompt arrives: how long is the longest gap, and the prompt's TTFT?"""
    rng, stolen = random.Random(args.seed), StolenTime()
    async with served(args.server) as endpoint:
        await stream(endpoint, words(rng, 64), 16)
        alone = await stream(endpoint, words(rng, args.long), 2)
        times: list[list[float]] = [[] for _ in range(args.streams)]
        running = [asyncio.create_task(stream(endpoint, words(rng, 64), args.tokens, own)) for own in times]
        running.append(asyncio.create_task(stolen.watch()))
        while min(map(len, times)) < 100:
            await asyncio.sleep(0.01)
        arrived = time.perf_counter()
        long = await stream(endpoint, words(rng, args.long), 2)
        ended = long["times"][0]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    calm = [b - a for own in times for a, b in pairwise(own[20:]) if b <= arrived]
    during = [gap for own in times for gap in gaps(own, arrived, ended)]
    untouched = stolen.untouched(times[0], arrived, ended)  # all streams get their tokens together
    limit = TURNS * statistics.median(calm) + EXTRA_S
    return {
        "streams_ran_through": all(own[-1] >= ended - limit for own in times),
        "undisturbed_p50_ms": 1e3 * statistics.median(calm),
        "undisturbed_max_ms": 1e3 * max(calm),
        "during_p50_ms": 1e3 * statistics.median(during),
        "during_p99_ms": 1e3 * percentile(during, 0.99),
        "longest_gap_ms": 1e3 * max(during),
        "limit_ms": 1e3 * limit,
        "gaps_over_limit": sum(gap > limit for gap in during),
        "gaps": len(during),
        "stolen_share": stolen.share(arrived, ended),
        "longest_gap_without_stolen_time_ms": 1e3 * max(untouched, default=0.0),
        "gaps_without_stolen_time_p99_ms": 1e3 * percentile(untouched or [0.0], 0.99),
        "long_ttft_s": ttft(long),
        "long_ttft_alone_s": ttft(alone),
        "long_ttft_ratio": ttft(long) / ttft(alone),
        "kept": max(during) <= limit and ttft(long) <= 2.5 * ttft(alone),
    }


async def short(args: argparse.Namespace) -> dict[str, Any]:
    """One long prompt, then `--shorts` short ones at once: their TTFT beside the same on an idle server."""
    rng = random.Random(args.seed)
    async with served(args.server) as endpoint:

        async def burst() -> list[float]:
            prompts = [words(rng, 50) for _ in range(args.shorts)]
            return [ttft(r) for r in await asyncio.gather(*(stream(endpoint, p, 16) for p in prompts))]

        await stream(endpoint, words(rng, 64), 16)
        one = ttft(await stream(endpoint, words(rng, 50), 16))
        idle = await burst()
        long = asyncio.create_task(stream(endpoint, words(rng, args.long), 2))
        await asyncio.sleep(0.3)
        behind = await burst()
        long_ttft = ttft(await long)
    ratio = percentile(behind, 0.95) / percentile(idle, 0.95)
    return {
        "short_ttft_one_idle_ms": 1e3 * one,
        "short_ttft_idle_p95_ms": 1e3 * percentile(idle, 0.95),
        "short_ttft_behind_p50_ms": 1e3 * percentile(behind, 0.5),
        "short_ttft_behind_p95_ms": 1e3 * percentile(behind, 0.95),
        "ratio_p95": ratio,
        "long_ttft_s": long_ttft,
        "kept": ratio <= 3,
    }


# -- in this process ----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Requests driven through a core: what each said, and when."""

    ids: dict[str, list[int]] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    end_s: dict[str, float] = field(default_factory=dict)
    finish: dict[str, FinishReason] = field(default_factory=dict)
    peak_blocks: int = 0
    stats: dict[str, int] = field(default_factory=dict)
    leaks: int = 0

    def take(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            self.ids.setdefault(event.request_id, []).extend(event.token_ids)
            if event.token_ids:
                self.first_s.setdefault(event.request_id, now)
            if event.finish is not None:
                self.finish[event.request_id] = event.finish
                self.end_s[event.request_id] = now


def drive(config: EngineConfig, requests: Sequence[tuple[float, CoreRequest]]) -> tuple[Run, dict[str, float]]:
    """Submits each request at its time, waits for all, audits. Returns: the run, and when each was sent."""
    run, sent = Run(), {}
    core = EngineCore(load_parts(config).backend, config, run.take)
    core.start()
    begin = time.monotonic()
    for at_s, request in requests:
        while (left := begin + at_s - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
        now_s = sent[request.request_id] = time.monotonic()
        core.submit([msgspec.structs.replace(request, arrival_s=now_s)])
    while len(run.end_s) < len(requests):
        time.sleep(0.02)
        cache = core.stats().cache
        run.peak_blocks = max(run.peak_blocks, cache.num_blocks - cache.free_blocks)
    core.check().result()
    stats = core.stats()
    run.leaks = stats.cache.num_blocks - stats.cache.free_blocks
    names = ("steps", "preemptions", "prefill_tokens", "recomputed_tokens", "output_tokens")
    run.stats = {name: getattr(stats.scheduler, name) for name in names}
    core.stop()
    return run, sent


def chat_requests(args: argparse.Namespace) -> list[tuple[float, CoreRequest]]:
    """Real prompts through the chat template, all at once; answers end where the model ends them, or at a limit."""
    parts = load_parts(EngineConfig(model=args.model))
    assert parts.chat_template is not None
    rng = random.Random(args.seed)
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    requests = []
    for i in range(args.requests):
        message = {"role": "user", "content": rng.choice(texts)[: args.chars]}
        ids = parts.tokenizer.encode_rendered(parts.chat_template.render([message]))
        request = CoreRequest(
            request_id=f"r{i}",
            prompt_ids=ids,
            params=SamplingParams(temperature=0.8),
            seed=i,
            max_tokens=args.tokens,
            stop_ids=frozenset(parts.tokenizer.eos_ids),
            arrival_s=0.0,
        )
        requests.append((0.0, request))
    parts.backend.close()
    return requests


def pressure(args: argparse.Namespace) -> dict[str, Any]:
    """KV for a quarter of what the requests would hold: same tokens, no leaks, how much is computed again."""
    requests = chat_requests(args)
    base = {"model": args.model, "max_queue": 4096, "max_queue_s": 0.0, "max_step_rows": args.rows}
    roomy, _ = drive(EngineConfig(**base), requests)
    num_blocks = max(roomy.peak_blocks // 4, args.tokens // 16 + 20)
    ours, _ = drive(EngineConfig(**base, num_blocks=num_blocks), requests)
    greedy = base | {"num_blocks": num_blocks, "reserve_output": False, "preempt": "last-in"}
    plain, _ = drive(EngineConfig(**greedy), requests)
    swapped, _ = drive(EngineConfig(**greedy, host_cache_mb=args.host_cache_mb), requests)

    def share(run: Run) -> float:
        return run.stats["recomputed_tokens"] / (run.stats["prefill_tokens"] + run.stats["output_tokens"])

    same = [run.ids == roomy.ids and run.finish == roomy.finish for run in (ours, plain, swapped)]
    return {
        "requests": len(requests),
        "peak_blocks_unpressured": roomy.peak_blocks,
        "num_blocks": num_blocks,
        "finished": sum(finish in (FinishReason.STOP, FinishReason.LENGTH) for finish in ours.finish.values()),
        "same_tokens": same[0],
        "same_tokens_plain": same[1],
        "same_tokens_swapped": same[2],
        "leaked_blocks": ours.leaks + plain.leaks + swapped.leaks,
        "recomputed_share": share(ours),
        "recomputed_share_plain": share(plain),
        "recomputed_share_swapped": share(swapped),
        "wall_s": {
            name: max(run.end_s.values()) - min(run.first_s.values())
            for name, run in (("unpressured", roomy), ("ours", ours), ("plain", plain), ("swapped", swapped))
        },
        "stats": {"unpressured": roomy.stats, "ours": ours.stats, "plain": plain.stats, "swapped": swapped.stats},
        "kept": all(same) and ours.leaks == 0 and share(ours) <= share(plain) / 2 and len(ours.finish) == len(requests),
    }


# -- the command --------------------------------------------------------------------------------------------------


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Where and how a result was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "command": " ".join(["python", "-m", "benchmarks.scheduling", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "seed": args.seed,
    }


def machine_seconds() -> tuple[float, float]:
    """CPU seconds that the whole machine has spent, and that this process and its ended children have."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    own = os.times()
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK"), sum(own[:4])


def main() -> int:
    """Runs one scenario, prints and saves its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=("stall", "short", "pressure"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, help="where to save the result as JSON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long", type=int, default=0, help="long prompt; 0 = 4,000 (stall), 6,000 (short)")
    parser.add_argument("--tokens", type=int, default=0, help="output tokens at most; 0 = 1,500 (stall), 48 (pressure)")
    parser.add_argument("--shorts", type=int, default=20)
    parser.add_argument("--requests", type=int, default=500, help="(pressure)")
    parser.add_argument("--host-cache-mb", type=int, default=500, help="host tier of the swapped run (pressure)")
    parser.add_argument("--rows", type=int, default=32, help="requests that may run together (pressure)")
    parser.add_argument("--chars", type=int, default=120, help="prompts are cut here (pressure)")
    args = parser.parse_args()
    args.server = [args.model]
    args.long = args.long or (6000 if args.scenario == "short" else 4000)
    args.tokens = args.tokens or (48 if args.scenario == "pressure" else 1500)
    begin, (machine, own) = time.monotonic(), machine_seconds()
    scenarios = {"stall": stall, "short": short, "pressure": pressure}
    result = scenarios[args.scenario](args)
    if asyncio.iscoroutine(result):
        result = asyncio.run(result)
    others = machine_seconds()
    other_cpu = (others[0] - machine - (others[1] - own)) / (time.monotonic() - begin)
    result = {"scenario": args.scenario, **provenance(args), "cores_used_by_others": round(other_cpu, 2), **result}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0 if result["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
