"""`firstlight doctor`: this machine's limits, what a model could reach and reaches, and what is in the way."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from firstlight.backend.cpu.backend import num_cores
from firstlight.backend.cpu.limits import measure_limits
from firstlight.cli.arguments import Invocation
from firstlight.cli.commands import DoctorConfig
from firstlight.cli.console import dim, note
from firstlight.cli.download import fetch_if_missing
from firstlight.cli.machine import cpu_features, findings
from firstlight.cli.own_server import own_server
from firstlight.errors import ConfigError
from firstlight.measure.bench import Prompt, send, served_model, warm_up
from firstlight.measure.client import Endpoint, get_json
from firstlight.measure.workload import synthetic_prompts
from firstlight.models.store import resolve_model
from firstlight.models.weights import load_model

__all__ = ["run"]

_PROMPT_TOKENS = 512
_ANSWER_TOKENS = 64


def run(invocation: Invocation) -> int:
    """Prints the findings; 0 whatever they are."""
    config = invocation.config(DoctorConfig)
    if config.threads < 0 or not 0 < config.seconds <= 60:
        raise ConfigError("`--threads` has to be 0 or more, `--seconds` above 0 and at most 60")
    if config.json and not Path(config.json).resolve().parent.is_dir():
        raise ConfigError(f"`--json {config.json}`: its folder does not exist", hint="create the folder first")
    fetch_if_missing(config.model)
    threads = config.threads or num_cores()
    decode_bytes, prefill_macs = _work_per_token(config.model)
    in_the_way = findings(threads, decode_bytes)  # before our own load could be taken for a neighbour
    note(dim(f"measuring limits with {threads} threads"))
    limits = measure_limits(threads, config.seconds)
    could = {
        "decode_tok_s": 1e9 * limits.dram_gb_s / decode_bytes,
        "prefill_tok_s": 1e9 * limits.int8_gmac_s / prefill_macs,
    }
    with own_server({"model": config.model, "threads": threads}) as endpoint:
        reached = asyncio.run(_reached(endpoint))
    document: dict[str, Any] = {
        "cpu_features": cpu_features(),
        "limits": asdict(limits),
        "attainable": could,
        "reached": reached,
    }
    if config.url:
        document["way_ms"] = asyncio.run(_way_ms(Endpoint.parse(config.url)))
        if document["way_ms"] > 5:
            in_the_way.append(f"the way to {config.url} takes {document['way_ms']:.1f} ms: a proxy or the network")
    document["in_the_way"] = in_the_way
    print(_render(document, threads))
    if config.json:
        Path(config.json).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    return 0


def _work_per_token(model: str) -> tuple[int, int]:
    """Bytes of weights that a decode step reads, and multiply-adds that one prompt token takes, attention aside."""
    loaded = load_model(resolve_model(model))
    layers = {name: weight for name, weight in loaded.weights.items() if "embed" not in name and "head" not in name}
    macs = sum(weight.rows * weight.cols for weight in layers.values())
    # The table of embeddings is read once per step where it is the output head too, else the head is.
    largest = max(weight.data.nbytes for weight in loaded.weights.values())
    others = sum(weight.data.nbytes for weight in layers.values())
    return others + largest, macs


async def _reached(endpoint: Endpoint) -> dict[str, float]:
    """Decode and prefill speed of one stream, medians of three prompts that share nothing."""
    model = await served_model(endpoint)
    await warm_up(endpoint, model)
    decode, prefill = [], []
    for seed in range(3):
        prompts = synthetic_prompts(seed, input_tokens=_PROMPT_TOKENS, prefix_tokens=0, max_tokens=1)
        record = await send(endpoint, model, next(prompts), True, time.perf_counter())
        prefill.append(record.prompt_tokens / record.ttft_s)
        short = Prompt([{"role": "user", "content": f"Tell story {seed}."}], _ANSWER_TOKENS)
        record = await send(endpoint, model, short, True, time.perf_counter())
        decode.append(1 / (record.tpot_s or float("inf")))
    return {"decode_tok_s": statistics.median(decode), "prefill_tok_s": statistics.median(prefill)}


async def _way_ms(endpoint: Endpoint) -> float:
    """The median time of a request that needs no work."""
    times = []
    for _ in range(9):
        before_s = time.perf_counter()
        await get_json(endpoint, "/v1/models")
        times.append(time.perf_counter() - before_s)
    return 1e3 * statistics.median(times)


def _render(document: dict[str, Any], threads: int) -> str:
    limits, could, reached = document["limits"], document["attainable"], document["reached"]
    lines = [
        f"CPU        {', '.join(document['cpu_features']) or 'none of the instruction sets looked for'}",
        f"threads    {threads}, not pinned: the system places them",
        f"DRAM       {limits['dram_gb_s']:.1f} GB/s read",
        f"int8       {limits['int8_gmac_s']:.0f} G multiply-adds/s ({limits['instructions']})",
    ]
    for name, key in (("decode", "decode_tok_s"), ("prefill", "prefill_tok_s")):
        share = 100 * reached[key] / could[key]
        lines.append(f"{name:<10} {reached[key]:.0f} tok/s of {could[key]:.0f} attainable ({share:.0f} %), one stream")
    if "way_ms" in document:
        lines.append(f"way        {document['way_ms']:.1f} ms per request that needs no work")
    found = document["in_the_way"]
    lines += ["", "in the way:"] + [f"  - {line}" for line in found] if found else ["", "nothing is in the way"]
    return "\n".join(lines)
