"""`firstlight explain`: where a request's time went, what was in the way, what to change. From a server or a file.

Knows the JSON of /debug/requests, no engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from firstlight.cli.arguments import Invocation
from firstlight.cli.commands import ExplainConfig
from firstlight.cli.debug_client import fetched_json
from firstlight.errors import ConfigError
from firstlight.measure.causes.timeline import CAUSES

__all__ = ["run", "waterfall"]

BAR_CELLS = 48
_RANKS = {"e2e": "e2e_ms", "ttft": "ttft_ms", "gap": "longest_gap_ms"}
_COLOURS = {
    "queue": "yellow",
    "prefill": "cyan",
    "decode": "green",
    "preempted": "red",
    "machine": "red",
    "client_slow": "magenta",
}


def run(invocation: Invocation) -> int:
    """Prints one waterfall per request that was asked for; 2 where there is none."""
    config = invocation.config(ExplainConfig)
    views = _of_file(config) if config.trace_file else _of_server(config)
    if config.json:
        print(json.dumps(views, indent=1))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for view in views:
        _show(console, view)
    return 0


def _of_server(config: ExplainConfig) -> list[dict[str, Any]]:
    if config.id:
        return [fetched_json(config.url, f"/debug/requests/{config.id}", config.api_key)]
    by, num = (config.by, config.slowest) if config.slowest else ("recent", 1)
    listed = fetched_json(config.url, f"/debug/requests?by={by}&num={num}", config.api_key)["requests"]
    if not listed:
        raise ConfigError("the server has finished no request yet", hint="send one, then ask again")
    return [fetched_json(config.url, f"/debug/requests/{view['id']}", config.api_key) for view in listed]


def _of_file(config: ExplainConfig) -> list[dict[str, Any]]:
    try:
        saved = json.loads(Path(config.trace_file).read_text("utf-8"))
        views: list[dict[str, Any]] = saved["firstlight"]["requests"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"`trace_file` {config.trace_file} cannot be used: {error!r}",
            param="trace_file",
            hint="write one with `firstlight trace -o FILE`",
        ) from None
    if config.id:
        views = [view for view in views if config.id in (view["id"], view["request_id"])]
    elif config.slowest:
        views = sorted(views, key=lambda view: view[_RANKS[config.by]] or 0.0, reverse=True)[: config.slowest]
    else:
        views = views[:1]
    if not views:
        raise ConfigError(f"no such request is in {config.trace_file}", param="trace_file")
    return views


def _show(console: Console, view: dict[str, Any]) -> None:
    ttft = "none" if view["ttft_ms"] is None else f"{view['ttft_ms']:.1f} ms"
    console.print(Text(view["id"], style="bold"), Text(f"({view['request_id']})", style="dim"))
    console.print(
        f"{view['route']}  {view['status']} {view['finish']}  {view['prompt_tokens']} prompt tokens"
        f" ({view['cached_tokens']} cached), {view['output_tokens']} out  TTFT {ttft}, longest gap"
        f" {view['longest_gap_ms']:.1f} ms, E2E {view['e2e_ms']:.1f} ms{_delivery(view)}"
    )
    console.print(waterfall(view))
    found = view["verdict"]
    console.print(Text(f"{found['cause']}: ", style="bold"), found["sentence"], sep="")
    if view["ttft_totals_ms"] and view["ttft_ms"]:
        console.print(f"first token: {_listed(view['ttft_totals_ms'])}")
    if view["gap_totals_ms"]:
        console.print(f"longest gap: {_listed(view['gap_totals_ms'])}")
    for other in view["beside"][:3]:
        console.print(
            f"beside it in {other['steps']} steps: {other['id']} ({other['prefill_tokens']} prompt tokens,"
            f" {other['decode_tokens']} output tokens)",
            style="dim",
        )
    console.print(Text("to change: ", style="bold"), found["change"], "\n", sep="")


def _delivery(view: dict[str, Any]) -> str:
    after_ms = view.get("delivery_ms", 0.0)
    return f", the client took it {after_ms:.0f} ms later" if after_ms else ""


def waterfall(view: dict[str, Any]) -> Table:
    """A row per cause, in the order in which they came, with a bar where on the way it was."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name, justify in (("cause", "left"), ("ms", "right"), ("%", "right")):
        table.add_column(name, justify=justify, style=None)  # type: ignore[arg-type]  # a literal, as rich wants it
    table.add_column("0" + f"{view['e2e_ms']:.0f} ms".rjust(BAR_CELLS - 1))
    table.add_column("")
    e2e_ms = max(view["e2e_ms"], 1e-6)
    for cause, ms in view["totals_ms"].items():
        bar = Text(_bar(view["spans"], cause, e2e_ms), style=_COLOURS.get(cause.partition(".")[0], "blue"))
        table.add_row(cause, f"{ms:.1f}", f"{ms / e2e_ms:.0%}", bar, Text(CAUSES[cause], style="dim"))
    return table


def _bar(spans: list[list[Any]], cause: str, e2e_ms: float) -> str:
    """Eighths of what each cell's share of this cause is."""
    filled = [0.0] * BAR_CELLS
    width_ms = e2e_ms / BAR_CELLS
    for name, start_ms, end_ms in spans:
        if name != cause:
            continue
        first, last = int(start_ms / width_ms), min(BAR_CELLS - 1, int(end_ms / width_ms))
        for cell in range(min(first, BAR_CELLS - 1), last + 1):
            low, high = max(start_ms, cell * width_ms), min(end_ms, (cell + 1) * width_ms)
            filled[cell] += max(0.0, high - low) / width_ms
    levels = " ▁▂▃▄▅▆▇█"
    return "".join(levels[min(8, round(share * 8) or (1 if share > 0 else 0))] for share in filled)


def _listed(totals_ms: dict[str, float]) -> str:
    ranked = sorted(totals_ms.items(), key=lambda item: item[1], reverse=True)
    return ", ".join(f"{cause} {ms:.1f} ms" for cause, ms in ranked[:4] if ms >= 0.1)
