"""What a load run says: percentiles, one table, one JSON document with every raw latency.

Knows finished records, not how they were produced.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from firstlight.measure.bench import LevelResult, LoadShape, RequestRecord
from firstlight.measure.percentile import percentile

__all__ = ["conditions", "percentile", "render_table", "report_document", "summarise"]

_PERCENTS = (50, 95, 99)


def summarise(level: LevelResult) -> dict[str, Any]:
    """Counts, rates and percentiles (milliseconds) of one concurrency level; failed requests count as errors only."""
    good = [record for record in level.records if record.error is None and record.times_s]
    output_tokens = sum(record.completion_tokens for record in good)
    return {
        "concurrency": level.concurrency,
        "requests": len(level.records),
        "errors": len(level.records) - len(good),
        "first_error": next((record.error for record in level.records if record.error), None),
        "wall_s": level.wall_s,
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "cached_tokens": sum(record.cached_tokens for record in good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / level.wall_s if level.wall_s else None,
        "requests_per_s": len(good) / level.wall_s if level.wall_s else None,
        "ttft_ms": _spread([record.ttft_s for record in good]),
        "itl_ms": _spread([gap for record in good for gap in record.gaps_s]),
        "tpot_ms": _spread([record.tpot_s for record in good if record.tpot_s is not None]),
        "e2e_ms": _spread([record.e2e_s for record in good]),
        "client": {
            "cpu_share_of_one_core": level.client_cpu_s / level.wall_s if level.wall_s else None,
            "cpu_us_per_event": 1e6 * level.client_cpu_s / max(1, sum(len(record.times_s) for record in good)),
            "loop_lag_p99_ms": _ms(percentile(level.loop_lags_s, 99)),
        },
    }


def render_table(levels: Sequence[LevelResult]) -> str:
    """The table a person reads: one line per concurrency level, p50 / p95 / p99 in milliseconds."""
    header = ["streams", "requests", "tok/s", "TTFT", "ITL", "TPOT", "E2E", "cached", "client"]
    rows = [header]
    for level in levels:
        summary = summarise(level)
        client = summary["client"]
        prompt_tokens = summary["prompt_tokens"]
        rows.append(
            [
                str(summary["concurrency"] or "open"),
                f"{summary['requests']}" + (f" ({summary['errors']} failed)" if summary["errors"] else ""),
                _number(summary["output_tokens_per_s"]),
                *(" / ".join(_number(summary[name][f"p{q}"]) for q in _PERCENTS) for name in _TIMES),
                f"{100 * summary['cached_tokens'] / prompt_tokens:.0f} %" if prompt_tokens else "-",
                f"{100 * (client['cpu_share_of_one_core'] or 0):.1f} % cpu, lag {_number(client['loop_lag_p99_ms'])}",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [
        "",
        "Times are p50 / p95 / p99 in ms. TTFT: sent to first text. ITL: gap between two arrivals of text.",
        "TPOT: (E2E - TTFT) / (tokens - 1).",
        "client: this program's share of one core, and how late its own timer fired (p99, ms).",
    ]
    return "\n".join(lines)


_TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


def report_document(
    levels: Sequence[LevelResult], shape: LoadShape, *, server: dict[str, Any], command: Sequence[str], version: str
) -> dict[str, Any]:
    """Everything needed to judge or repeat the run: commit, command, hardware, versions, load, seed, raw latencies."""
    return {
        **conditions(command, version),
        "server": server,
        "load": msgspec.to_builtins(shape),
        "summary": [summarise(level) for level in levels],
        "records": [_raw(record, level.concurrency) for level in levels for record in level.records],
    }


def conditions(command: Sequence[str], version: str) -> dict[str, Any]:
    """When, how and where something is measured."""
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": list(command),
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": {"firstlight": version, "python": platform.python_version(), "os": platform.platform()},
    }


def _raw(record: RequestRecord, concurrency: int) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "started_s": record.sent_s,
        "ttft_s": record.ttft_s if record.times_s else None,
        "gaps_s": record.gaps_s,
        "e2e_s": record.e2e_s,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "finish": record.finish,
        "error": record.error,
    }


def _spread(values_s: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percent}": _ms(percentile(values_s, percent)) for percent in _PERCENTS}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _commit() -> str | None:
    """The checkout's commit, "+" after it when there are changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (head.stdout.strip() + ("+" if changes.stdout.strip() else "")) or None


def _hardware() -> dict[str, Any]:
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    memory_kb = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu, "usable_cores": cores, "memory_mb": memory_kb // 1024 if memory_kb else None}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
