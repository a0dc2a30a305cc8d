"""Real JSON schemas against a running server: how many are taken, whether answers fit them, what a grammar costs.

    firstlight serve smollm2-135m --port 8000
    python -m benchmarks.json_schemas http://127.0.0.1:8000 SCHEMAS.jsonl.gz --out benchmarks/results/json-schemas.json

SCHEMAS has one object per line: `id`, `schema`, `turns` (the prompt first). An answer that ended with "stop" must be
JSON that its schema's own validator takes; one cut by max_tokens is counted apart. Speed is measured in alternating
rounds of 8 streams of equal length, with a schema and without.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import platform
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema

MAX_TOKENS = 640
MAX_PROMPT_CHARS = 400
SPEED_STREAMS = 8
SPEED_TOKENS = 128
ENDLESS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["book", "film", "song"]},
            "year": {"type": "integer", "minimum": 1800, "maximum": 2100},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        },
        "required": ["name", "kind", "year", "tags"],
        "additionalProperties": False,
    },
}


async def outcome(http: httpx.AsyncClient, gate: asyncio.Semaphore, item: dict[str, Any], at: int) -> dict[str, Any]:
    """What became of one schema: `refused`, `cut`, `valid` or `invalid`, with the reason where there is one."""
    schema = json.loads(item["schema"]) if isinstance(item["schema"], str) else item["schema"]
    body = {
        "messages": [{"role": "user", "content": item["turns"][0][:MAX_PROMPT_CHARS]}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "max_tokens": MAX_TOKENS,
        "temperature": 0.7,
        "seed": at,
    }
    async with gate:
        answer = await http.post("/v1/chat/completions", json=body)
    if answer.status_code == 400:
        return {"id": item["id"], "outcome": "refused", "why": answer.json()["error"]["message"]}
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] != "stop":
        return {"id": item["id"], "outcome": "cut"}
    try:
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(choice["message"]["content"]))
    except (ValueError, jsonschema.ValidationError) as error:
        return {"id": item["id"], "outcome": "invalid", "why": str(error), "text": choice["message"]["content"]}
    return {"id": item["id"], "outcome": "valid"}


async def stream_rate(http: httpx.AsyncClient, at: int, form: dict[str, Any]) -> float:
    """Tokens per second of one stream, from its first token to its last."""
    body = {
        "messages": [{"role": "user", "content": f"List works of art, number {at} first, as a JSON list."}],
        "max_tokens": SPEED_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0.7,
        "seed": at,
        "stream_options": {"include_usage": True},
        **form,
    }
    first = last = 0.0
    tokens = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            elif chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
    assert tokens == SPEED_TOKENS, f"{tokens} tokens, wanted {SPEED_TOKENS}"
    return (tokens - 1) / (last - first)


async def speed(http: httpx.AsyncClient, rounds: int) -> dict[str, Any]:
    """Median stream rates of alternating rounds, and their ratio."""
    schema = {"type": "json_schema", "json_schema": {"name": "works", "schema": ENDLESS}}
    forms: dict[str, dict[str, Any]] = {"free": {}, "constrained": {"response_format": schema}}
    rates: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, form in forms.items():
            got = await asyncio.gather(*(stream_rate(http, at, form) for at in range(SPEED_STREAMS)))
            if number > 0:  # the first round warms up
                rates[name] += got
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "streams": SPEED_STREAMS,
        "tokens": SPEED_TOKENS,
        "rounds": rounds,
        "tokens_per_s_per_stream": medians,
        "ratio": medians["constrained"] / medians["free"],
        "raw": rates,
    }


def earlier(out: Path) -> list[dict[str, Any]]:
    """The outcomes of a run that this one continues."""
    outcomes: list[dict[str, Any]] = json.loads(out.read_text())["schemas"]["outcomes"]
    return outcomes


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything the arguments ask for, as one JSON object."""
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "machine": f"{platform.processor() or platform.machine()}, {platform.platform()}",
    }
    async with httpx.AsyncClient(base_url=args.url, timeout=600) as http:
        result["model"] = (await http.get("/v1/models")).json()["data"][0]["id"]
        if args.rounds:
            result["speed"] = await speed(http, args.rounds)
        if args.schemas:
            raw = args.schemas.read_bytes()
            text = gzip.decompress(raw) if args.schemas.suffix == ".gz" else raw
            items = [json.loads(line) for line in text.splitlines()]
            chosen = list(enumerate(items))[args.offset : args.offset + args.limit if args.limit else None]
            gate = asyncio.Semaphore(args.concurrency)
            outcomes = earlier(args.out) if args.offset else []
            outcomes += await asyncio.gather(*(outcome(http, gate, item, at) for at, item in chosen))
            counts = Counter(one["outcome"] for one in outcomes)
            finished = counts["valid"] + counts["invalid"]
            result["schemas"] = {
                "num": len(outcomes),
                "counts": dict(counts),
                "accepted_share": 1 - counts["refused"] / len(outcomes),
                "valid_share_of_finished": counts["valid"] / max(1, finished),
                "max_tokens": MAX_TOKENS,
                "outcomes": outcomes,
            }
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("schemas", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0, help="schemas to try; 0 = all")
    parser.add_argument("--offset", type=int, default=0, help="go on where an earlier run into the same file ended")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the speed measurement; 0 = none")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    shown = {name: value for name, value in result.items() if name not in ("schemas", "speed")}
    shown |= {"speed": {k: v for k, v in result.get("speed", {}).items() if k != "raw"}}
    shown |= {"schemas": {k: v for k, v in result.get("schemas", {}).items() if k != "outcomes"}}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
