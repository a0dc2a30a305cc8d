"""Hostile requests by the thousand: fuzzed JSON, huge numbers, deep nesting, NUL, surrogates, wrong types, giant
headers, slow and broken connections. The server must not crash, give no 5xx but an honest 503, and stay exact.

    python -m benchmarks.hostile --requests 10000 --seed 1 [--url http://127.0.0.1:8000] [--json FILE]

Without --url a server over the fake backend is started in this process. Every request follows from (seed, index), so
a finding is repeated with --only INDEX. Exit status 1 on any finding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.server.run import ServerThread

GOOD: dict[str, tuple[str, Any]] = {
    "/v1/chat/completions": ("messages", [{"role": "user", "content": "hi"}]),
    "/v1/completions": ("prompt", "hi"),
    "/v1/embeddings": ("input", "hi"),
    "/tokenize": ("content", "hi"),
    "/detokenize": ("tokens", [104, 105]),
    "/v1/cancel": ("id", "nobody"),
}
"""A body that each route takes."""
ROUTES = tuple(GOOD)
PATHS = (*ROUTES, "/", "/v1/models", "/v1/models/x", "/health", "/ready", "/metrics", "/openapi.json", "/nope")
_FIELD_NAMES = (
    "model messages prompt input content tokens id stream stream_options n stop max_tokens temperature top_p "
    "top_k min_p seed logit_bias presence_penalty frequency_penalty repetition_penalty ignore_eos "
    "stop_token_ids logprobs top_logprobs timings timeout priority deadline_ms response_format "
    "structured_outputs guided_json guided_regex guided_grammar guided_choice tools tool_choice echo best_of "
    "user metadata store encoding_format dimensions pooling continue_final_message max_completion_tokens "
    "add_special parse_special"
)
FIELDS = tuple(_FIELD_NAMES.split())
ODD_TEXT = ("", "\0", "\ud800", "\U0010ffff", "a" * 5000, "<|im_end|>", "{{7*7}}", "é" * 300, "\r\n\r\n", "../../etc")
ODD_NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, -1e308, 5e-324, 0.1, 1e-9)
PROBE = {"prompt": "exact?", "max_tokens": 16, "temperature": 1.0, "seed": 7, "logprobs": 2}
CONCURRENCY = 32
READ_TIMEOUT_S = 30.0


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, oddly often at an edge."""
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return rng.choice(ODD_NUMBERS)
    if kind == 1:
        return rng.choice(ODD_TEXT)
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return "".join(
            chr(rng.choice((rng.randrange(32), rng.randrange(0xD800), 34, 92))) for _ in range(rng.randrange(20))
        )
    if kind in (4, 5):
        return rng.randrange(-5, 300)
    if kind in (6, 7):
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice((*FIELDS, "type", "role", "x\0")): odd_value(rng, depth + 1) for _ in range(rng.randrange(5))}


def near_valid(rng: random.Random, route: str) -> dict[str, Any]:
    """A request that its route takes, mostly with one to three members made odd."""
    member, value = GOOD[route]
    body: dict[str, Any] = {member: value}
    if route.endswith("completions"):
        body |= {"max_tokens": rng.randrange(1, 5), "stream": rng.random() < 0.3}
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        known = rng.random() < 0.5
        body[rng.choice(FIELDS)] = rng.choice((0, 1, 2, 0.5, True, "a", [], {}, ["a"])) if known else odd_value(rng)
    if rng.random() < 0.95:
        body.update({name: 3 for name in ("max_tokens", "max_completion_tokens") if name in body})
    return body


def body_of(rng: random.Random, route: str) -> bytes:
    """The bytes of one body, good JSON or not."""
    kind = rng.randrange(10)
    if kind < 5:
        return json.dumps(near_valid(rng, route)).encode("utf-8", "surrogatepass")
    if kind == 5:
        return json.dumps(odd_value(rng)).encode()
    if kind == 6:
        opening, depth = rng.choice((b"[", b'{"a":', b'{"messages":[')), rng.choice((50, 1000, 100_000))
        return opening * depth
    if kind == 7:
        raw = bytearray(json.dumps(near_valid(rng, route)).encode())
        for _ in range(rng.randrange(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw)
    if kind == 8:
        digits = b"9" * rng.choice((20, 400, 5000))
        return (
            b'{"prompt":"hi","' + rng.choice(FIELDS).encode() + b'":' + rng.choice((b"-", b"", b"1e")) + digits + b"}"
        )
    return rng.randbytes(rng.randrange(200))


def request_of(seed: int, index: int) -> tuple[bytes, str]:
    """(the bytes on the wire, how they are sent: "whole", "slow", "cut" or "torn")."""
    rng = random.Random(f"{seed}/{index}")
    way = rng.choices(("whole", "slow", "cut", "torn"), (90, 3, 4, 3))[0]
    method, path = "POST", rng.choice(ROUTES)
    if rng.random() < 0.08:
        method = rng.choice(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "BREW", "\0"))
        path = rng.choice((*PATHS, "/%00", "/" + "a" * 9000, "*", "//", "/v1/models/" + "%ff" * 50))
    body = body_of(rng, path if path in GOOD else ROUTES[0])
    headers = ["host: x", "content-type: application/json", "connection: close"]
    odd = rng.random()
    if odd < 0.02:
        headers.append("x-big: " + "a" * rng.choice((10_000, 40_000, 200_000)))
    elif odd < 0.04:
        headers += [f"x-{i}: {i}" for i in range(rng.choice((100, 5000)))]
    elif odd < 0.05:
        headers.append("content-encoding: gzip")
    elif odd < 0.06:
        headers.append("x-request-id: " + rng.choice(("a\tb", "é", "a" * 200, "")))
    elif odd < 0.07:
        headers.append("authorization: Bearer \xff\x00")
    length = str(len(body))
    if rng.random() < 0.03:
        length = rng.choice(("-1", "99999999999999999999", "abc", "0x10", str(len(body) + 5), ""))
    headers.append("content-length: " + length)
    head = f"{method} {path} HTTP/1.1\r\n" + "\r\n".join(headers) + "\r\n\r\n"
    return head.encode("latin-1", "replace") + body, way


async def sent(host: str, port: int, raw: bytes, way: str, rng: random.Random) -> int:
    """Sends one request; its status, 0 where the server closed without one or we left first."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if way == "slow":
            for byte in raw[:40]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.002)
            writer.write(raw[40:])
        elif way == "cut":
            writer.write(raw[: rng.randrange(1, len(raw))])
            await writer.drain()
            return 0
        elif way == "torn":
            middle = rng.randrange(1, len(raw))
            writer.write(raw[:middle])
            await asyncio.sleep(0.01)
            writer.write(raw[middle:])
        else:
            writer.write(raw)
        if writer.can_write_eof() and rng.random() < 0.1:
            writer.write_eof()
        line = await asyncio.wait_for(reader.readline(), READ_TIMEOUT_S)
        rest = await asyncio.wait_for(reader.read(), READ_TIMEOUT_S)
        del rest
        parts = line.split()
        return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
    except (ConnectionError, OSError):
        return 0
    finally:
        writer.transport.abort()


async def attack(url: str, indices: range, seed: int) -> tuple[Counter[int], list[str]]:
    """Statuses and findings."""
    address = urlsplit(url)
    statuses: Counter[int] = Counter()
    findings: list[str] = []
    todo = iter(indices)

    async def worker() -> None:
        for index in todo:
            raw, way = request_of(seed, index)
            try:
                status = await sent(str(address.hostname), address.port or 80, raw, way, random.Random(index))
            except TimeoutError:
                findings.append(f"request {index} ({way}): no answer in {READ_TIMEOUT_S:g} s")
                continue
            statuses[status] += 1
            if status >= 500 and status != 503:
                findings.append(f"request {index} ({way}): status {status}: {raw[:200]!r}")

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return statuses, findings


def run(url: str, indices: range, seed: int) -> dict[str, Any]:
    """Attacks, then compares an answer with the one given before and audits the blocks."""
    with httpx.Client(base_url=url, timeout=60) as http:
        before = http.post("/v1/completions", json=PROBE).json()["choices"]
        begin = time.monotonic()
        statuses, findings = asyncio.run(attack(url, indices, seed))
        took_s = time.monotonic() - begin
        after = http.post("/v1/completions", json=PROBE)
        if after.status_code != 200 or after.json()["choices"] != before:
            findings.append(f"the probe's answer has changed: {after.text[:300]}")
        for _ in range(200):
            check = http.get("/debug/check").json()
            if not (check.get("running") or check.get("waiting")):
                break
            time.sleep(0.05)
        if check.get("status") != "ok" or check["used_blocks"] or check["running"] or check["waiting"]:
            findings.append(f"the audit says: {check}")
    return {
        "seed": seed,
        "requests": len(indices),
        "took_s": round(took_s, 1),
        "statuses": {str(status): statuses[status] for status in sorted(statuses)},
        "findings": findings,
    }


def main() -> int:
    """Runs as the command line says; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="", help="server to attack; without it one is started")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, default=-1, help="send this one request")
    parser.add_argument("--json", default="", help="write the result to this file")
    args = parser.parse_args()
    indices = range(args.requests) if args.only < 0 else range(args.only, args.only + 1)
    config = EngineConfig(backend="fake")
    thread = ServerThread(lambda: AsyncEngine(config, load=fake_parts), ServerConfig(port=0, read_timeout_s=5))
    with nullcontext() if args.url else thread as server:
        result = run(args.url or server.url, indices, args.seed)
    print(json.dumps(result, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
