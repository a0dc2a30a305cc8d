"""What the prefix cache saves on the real model, over HTTP: a shared prefix, and conversations.

    python -m benchmarks.caching shared --out benchmarks/results/caching-shared.json
    python -m benchmarks.caching turns --out benchmarks/results/caching-turns.json
    python -m benchmarks.caching restart --out benchmarks/results/caching-restart.json

Prompt tokens are distinct where no earlier prompt or answer begins with the same tokens. Each prints one JSON object
and exits 1 where more than 1.05 times the distinct ones were computed (`restart`: where nothing was brought back).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.document import conditions, write
from benchmarks.scheduling import percentile, served, words
from firstlight.config import EngineConfig
from firstlight.engine.load import EngineParts, load_parts
from firstlight.measure.client import Endpoint, stream_events

MAX_COMPUTED = 1.05
Message = dict[str, str]


class Distinct:
    """Counts tokens that no earlier sequence has at their place behind the same beginning."""

    def __init__(self, parts: EngineParts) -> None:
        assert parts.chat_template is not None
        self.num = 0
        self._template, self._tokenizer = parts.chat_template, parts.tokenizer
        self._root: dict[int, Any] = {}

    def add(self, messages: list[Message], *, is_prompt: bool) -> None:
        """A prompt counts; an answer only makes the next turn's beginning known."""
        node = self._root
        for token in self._tokenizer.encode_rendered(self._template.render(messages, add_generation_prompt=is_prompt)):
            self.num += is_prompt and token not in node
            node = node.setdefault(token, {})


async def ask(endpoint: Endpoint, messages: list[Message], max_tokens: int) -> dict[str, Any]:
    """One streamed chat answer: its text, TTFT, end, and the prompt tokens that were computed."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True, "timings": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    sent, text, first, usage, timings = time.perf_counter(), "", 0.0, {}, {}
    async for at, event in stream_events(endpoint, "/v1/chat/completions", body):
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") or ""
            first = first or (at if piece else 0.0)
            text += piece
        usage = event.get("usage") or usage
        timings = event.get("timings") or timings
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "text": text,
        "sent": sent,
        "ttft_s": first - sent,
        "end": time.perf_counter(),
        "prompt_tokens": usage["prompt_tokens"],
        "computed": usage["prompt_tokens"] - cached,
        "loaded": timings.get("loaded_tokens", 0),
    }


def summary(records: list[dict[str, Any]], distinct: int, ttft_of: list[dict[str, Any]]) -> dict[str, Any]:
    computed = sum(record["computed"] for record in records)
    ttft = [record["ttft_s"] for record in ttft_of]
    return {
        "requests": len(records),
        "wall_s": max(record["end"] for record in records) - min(record["sent"] for record in records),
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p95_s": percentile(ttft, 0.95),
        "prompt_tokens": sum(record["prompt_tokens"] for record in records),
        "distinct_prompt_tokens": distinct,
        "computed_prompt_tokens": computed,
        "computed_over_distinct": computed / distinct,
        "kept": computed <= MAX_COMPUTED * distinct,
    }


async def shared(args: argparse.Namespace, distinct: Distinct) -> dict[str, Any]:
    """`--requests` chats, `--concurrency` at a time, whose system prompt of about 1,000 tokens is the same."""
    rng = random.Random(args.seed)
    system = {"role": "system", "content": words(rng, args.prefix)}
    conversations = [[system, {"role": "user", "content": words(rng, 30)}] for _ in range(args.requests)]
    for messages in conversations:
        distinct.add(messages, is_prompt=True)
    waiting, records = list(reversed(conversations)), []

    async def client(endpoint: Endpoint) -> None:
        while waiting:
            records.append(await ask(endpoint, waiting.pop(), args.tokens))

    async with served(args.server) as endpoint:
        await ask(endpoint, [{"role": "user", "content": "Hello"}], 4)
        await asyncio.gather(*(client(endpoint) for _ in range(args.concurrency)))
    return summary(records, distinct.num, records)


async def turns(args: argparse.Namespace, distinct: Distinct) -> dict[str, Any]:
    """`--conversations` at once, `--turns` each; TTFT is of the turns after the first."""
    rng = random.Random(args.seed)
    records: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []

    async def conversation(endpoint: Endpoint, asked: list[str]) -> None:
        messages: list[Message] = []
        for at, text in enumerate(asked):
            messages = [*messages, {"role": "user", "content": text}]
            distinct.add(messages, is_prompt=True)
            record = await ask(endpoint, messages, args.tokens)
            messages = [*messages, {"role": "assistant", "content": record["text"]}]
            distinct.add(messages, is_prompt=False)
            records.append(record)
            later.extend([record] if at else [])

    texts = [[words(rng, 200 if at == 0 else 40) for at in range(args.turns)] for _ in range(args.conversations)]
    async with served(args.server) as endpoint:
        await ask(endpoint, [{"role": "user", "content": "Hello"}], 4)
        await asyncio.gather(*(conversation(endpoint, asked) for asked in texts))
    return summary(records, distinct.num, later)


async def restart(args: argparse.Namespace, _: Distinct) -> dict[str, Any]:
    """The same long prompt before and after the server is stopped and started on the same directory of blocks."""
    messages = [{"role": "user", "content": words(random.Random(args.seed), args.prefix)}]
    with tempfile.TemporaryDirectory() as directory:
        records = []
        for _ in range(2):
            async with served([*args.server, "--disk-cache", directory]) as endpoint:
                await ask(endpoint, [{"role": "user", "content": "Hello"}], 4)
                records.append(await ask(endpoint, messages, args.tokens))
    before, after = records
    return {
        "prompt_tokens": before["prompt_tokens"],
        "ttft_computed_s": before["ttft_s"],
        "ttft_from_disk_s": after["ttft_s"],
        "loaded_tokens": after["loaded"],
        "computed_tokens": after["computed"],
        "same_text": before["text"] == after["text"],
        "kept": before["text"] == after["text"] and after["loaded"] > 0,
    }


def main() -> int:
    """Runs one scenario, prints and saves its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=("shared", "turns", "restart"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, help="where to save the result as JSON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens of the shared prefix, or of the long prompt")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each answer")
    args = parser.parse_args()
    args.server = [args.model]
    parts = load_parts(EngineConfig(model=args.model, num_blocks=16))
    parts.backend.close()
    scenario = {"shared": shared, "turns": turns, "restart": restart}[args.scenario]
    result = asyncio.run(scenario(args, Distinct(parts)))
    document = conditions("benchmarks.caching", 0) | {"scenario": args.scenario, "model": args.model} | result
    write(document, args.out)
    return 0 if result["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
