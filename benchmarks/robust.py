"""Many clients that come and go: no request is lost, no block is leaked, memory stays flat, answers stay exact.

Starts a server on the real model and drives it with real prompts of mixed length from many clients at once; a share of
them disconnects at a random moment: in the queue, during prefill, between tokens. Greedy answers that ran to their end
are asked for again, alone, and must be equal to the byte.

    python -m benchmarks.robust MODEL.gguf --requests 2000 --clients 64 --out benchmarks/results/robust-NAME.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import conditions, write
from benchmarks.peers import Server, memory_mb, running
from firstlight.errors import FirstlightError
from firstlight.measure.client import Endpoint, get_json, stream_events

PROMPTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "prompts.jsonl"
NUM_ASKED_AGAIN = 60
SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request and when its client gives up: after so many seconds, after so many events, or never."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    leave_after_s: float | None
    leave_after_events: int | None

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "model",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class Crowd:
    """What the clients saw, together."""

    def __init__(self, url: str) -> None:
        self.endpoint = Endpoint.parse(url)
        self.outcomes: Counter[str] = Counter()
        self.errors: list[str] = []
        self.whole: list[tuple[Job, str]] = []

    async def ask(self, job: Job) -> None:
        """Sends one request, leaves when the job says so, and counts how it ended."""
        seen = Answer()
        try:
            async with asyncio.timeout(job.leave_after_s):
                await self._read(job, seen)
        except TimeoutError:
            self.outcomes["left before the first token" if seen.num_events == 0 else "left between tokens"] += 1
        except FirstlightError as error:
            self.outcomes["failed"] += 1
            self.errors.append(error.message)
        else:
            if job.leave_after_events is not None and seen.num_events >= job.leave_after_events:
                self.outcomes["left between tokens"] += 1
            elif seen.finish is None or seen.num_output == 0:
                self.outcomes["lost"] += 1
                self.errors.append(f"no finish or no usage: {seen}")
            else:
                self.outcomes[f"finished: {seen.finish}"] += 1
                if job.temperature == 0:
                    self.whole.append((job, seen.text))

    async def _read(self, job: Job, seen: Answer) -> None:
        async with contextlib.aclosing(stream_events(self.endpoint, "/v1/completions", job.body)) as events:
            async for _, event in events:
                seen.num_events += 1
                for choice in event.get("choices") or ():
                    seen.text += choice.get("text") or ""
                    seen.finish = choice.get("finish_reason") or seen.finish
                if usage := event.get("usage"):
                    seen.num_output = usage["completion_tokens"]
                if job.leave_after_events is not None and seen.num_events >= job.leave_after_events:
                    return


@dataclass(slots=True)
class Answer:
    """What one client has read so far."""

    text: str = ""
    finish: str | None = None
    num_output: int = 0
    num_events: int = 0


def jobs(num: int, seed: int, share_leaving: float) -> list[Job]:
    """Real prompts cut at random lengths; every draw comes from `seed`."""
    source = random.Random(seed)
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    made = []
    for _ in range(num):
        text = "\n\n".join(source.choices(texts, k=source.choice((1, 1, 1, 2, 4))))
        leaves = source.random() < share_leaving
        by_time = source.random() < 0.5
        made.append(
            Job(
                prompt=text[: source.randint(1, len(text))],
                max_tokens=source.choice((1, 4, 16, 16, 32, 64)),
                temperature=source.choice((0.0, 0.0, 0.8)),
                seed=source.randrange(1 << 31),
                leave_after_s=source.uniform(0.0, 8.0) if leaves and by_time else None,
                leave_after_events=source.randint(1, 12) if leaves and not by_time else None,
            )
        )
    return made


async def drive(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """The whole run against a server that is ready."""
    crowd = Crowd(url)
    waiting = jobs(args.requests, args.seed, args.share_leaving)
    todo, rss, started_s = iter(waiting), [], time.perf_counter()
    num_done = 0

    async def client() -> None:
        nonlocal num_done
        for job in todo:
            await crowd.ask(job)
            num_done += 1
            if num_done % max(1, args.requests // 20) == 0:
                rss.append({"after_requests": num_done, "rss_mb": memory_mb(pid)["rss_mb"]})
                print(f"{num_done}: {dict(crowd.outcomes)} {rss[-1]['rss_mb']:.0f} MB", file=sys.stderr, flush=True)

    await asyncio.gather(*[client() for _ in range(args.clients)])
    took_s = time.perf_counter() - started_s
    audit: dict[str, Any] = {}
    deadline_s = time.perf_counter() + SETTLE_S
    while time.perf_counter() < deadline_s:
        audit = await get_json(crowd.endpoint, "/debug/check")
        if not audit.get("running") and not audit.get("waiting"):
            break
        await asyncio.sleep(0.2)
    again = random.Random(args.seed).sample(crowd.whole, min(NUM_ASKED_AGAIN, len(crowd.whole)))
    different = [job.prompt[:80] for job, text in again if await alone(crowd.endpoint, job) != text]
    late = [entry["rss_mb"] for entry in rss[len(rss) // 2 :]]
    return {
        "took_s": round(took_s, 1),
        "outcomes": dict(sorted(crowd.outcomes.items())),
        "errors": crowd.errors[:20],
        "audit": audit,
        "asked_again": len(again),
        "different": different,
        "rss": rss,
        "rss_growth_in_second_half_mb": round(late[-1] - statistics.median(late[: max(1, len(late) // 4)]), 1),
    }


async def alone(endpoint: Endpoint, job: Job) -> str:
    """The same request with nobody else about."""
    parts = [event["choices"] async for _, event in stream_events(endpoint, "/v1/completions", job.body)]
    return "".join(choice.get("text") or "" for choices in parts for choice in choices or ())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--share-leaving", type=float, default=0.4, help="share of clients that disconnect early")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes; standard output without it")
    return parser.parse_args()


async def run(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "firstlight", "serve", str(args.model), "--port", "{port}"]
    command += ["--threads", str(args.threads), "--served-model-name", "model"]
    async with running(Server("firstlight", command, "/ready")) as (client, pid, _):
        return await drive(client.url, pid, args)


def main() -> None:
    args = parse_args()
    document = {
        **conditions("benchmarks.robust", args.threads),
        "result": asyncio.run(run(args)),
    }
    write(document, args.out)
    result = document["result"]
    assert isinstance(result, dict)
    audit = result["audit"]
    is_idle = not (audit.get("running") or audit.get("waiting") or audit.get("used_blocks"))
    broken = result["errors"] or result["different"] or audit.get("status") != "ok" or not is_idle
    sys.exit("something was lost or changed: see the result" if broken else 0)


if __name__ == "__main__":
    main()
