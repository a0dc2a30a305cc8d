"""The screen that `firstlight serve` opens with: what runs here, on what, how much fits, and how to try it.

Knows numbers and how to write them; asks nobody.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from firstlight.backend.base import BackendInfo

__all__ = ["StartupFacts", "example_curl", "render_startup"]

_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupFacts:
    """What is known once the server is ready."""

    version: str
    model: str
    backend: BackendInfo
    num_parameters: int
    """0: not known."""
    file_bytes: int
    """0: not from a file."""
    url: str
    load_s: float
    warm_up_s: float
    needs_key: bool = False


def render_startup(facts: StartupFacts) -> str:
    """The whole screen, without colours."""
    backend = facts.backend
    total_s = facts.load_s + facts.warm_up_s
    rows = [
        ("model", ", ".join([facts.model, *_model_parts(facts)])),
        ("weights", _weights(backend)),
        ("compute", _compute(facts)),
        ("KV cache", _kv_cache(backend)),
        ("steps", f"up to {backend.max_step_rows} requests and {backend.max_step_tokens:,} tokens each"),
        ("address", facts.url + (" (needs an API key)" if facts.needs_key else "")),
    ]
    lines = [f"firstlight {facts.version}: ready in {total_s:.1f} s "
             f"(load {facts.load_s:.1f} s, warm-up {facts.warm_up_s:.1f} s)", ""]  # fmt: skip
    lines += [f"  {name:<9} {text}" for name, text in rows if text]
    lines += ["", "Try it:", "", example_curl(facts.url, facts.model, needs_key=facts.needs_key), ""]
    return "\n".join(lines)


def example_curl(url: str, model: str, *, needs_key: bool = False) -> str:
    """A curl command that streams a short answer from the server at `url`."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    return (
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{json.dumps(body)}'"
    )  # fmt: skip


def _model_parts(facts: StartupFacts) -> list[str]:
    parts = []
    if facts.num_parameters:
        parts.append(f"{_count(facts.num_parameters)} parameters")
    if facts.file_bytes:
        parts.append(f"{_size(facts.file_bytes)} file")
    parts.append(f"context {facts.backend.max_model_len:,} tokens")
    return parts


def _weights(backend: BackendInfo) -> str:
    if not backend.weight_bytes:
        return ""
    layouts = sorted(backend.layouts.items(), key=lambda item: -item[1])
    split = ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in layouts)
    return f"{_size(backend.weight_bytes)} in memory" + (f": {split}" if split else "")


def _compute(facts: StartupFacts) -> str:
    threads = f"{facts.backend.num_threads} thread{'s' if facts.backend.num_threads != 1 else ''}"
    return f"{facts.backend.name} backend, {threads}"


def _kv_cache(backend: BackendInfo) -> str:
    num_tokens = backend.num_blocks * backend.block_size
    contexts = num_tokens / backend.max_model_len
    return (
        f"{backend.num_blocks:,} blocks x {backend.block_size} tokens = {num_tokens:,} tokens "
        f"({contexts:.1f} full contexts), {_size(backend.num_blocks * backend.kv_bytes_per_block)}"
    )


def _size(num_bytes: int) -> str:
    if num_bytes >= 1000 * _MB:
        return f"{num_bytes / _MB / 1000:.2f} GB"
    return f"{num_bytes / _MB:.0f} MB" if num_bytes >= 10 * _MB else f"{num_bytes / _MB:.1f} MB"


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"
