"""What it costs to know: causes, the rings and the metrics on and off in turn on one server, A B B A.

One process serves the real model; between two turns, while nothing runs, what notes and counts is exchanged for parts
that do nothing (no option does that: it would save too little). Another process is the client. A turn is some streams
of the same cached prompts; each pair of turns that follow one another gives a ratio. On a machine whose
speed wavers by more than the cost, `--fake` says more: the same over a backend that computes next to nothing, where the
CPU time of a token, on less off, is the cost.

    python -m benchmarks.recording MODEL.gguf --streams 16 --seconds 70 --out benchmarks/results/recording-NAME.json
    python -m benchmarks.recording --fake --streams 16 --seconds 70 --out FILE   (adds to the file, as each further run)

With `--ops`, on and off is instead the timing of each op, which runs while somebody records a trace.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.document import conditions, write
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.core import EngineCore
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.engine.load import load_parts
from firstlight.engine.recorder import StepRecorder
from firstlight.measure.bench import Prompt, prompt_source, run_level, served_model
from firstlight.measure.causes import FinishedRequest, Trace, TraceBook
from firstlight.measure.client import Endpoint
from firstlight.server.delivery import Deliveries
from firstlight.server.record import RequestRecord
from firstlight.server.run import ServerThread
from firstlight.server.service import Service

TOKENS = 24
SETTLE_S = 0.05
"""After a turn, before parts are exchanged: the last request is closed by then."""


def nothing(*_: Any, **__: Any) -> None:
    return None


class NoBook(TraceBook):
    """Gives traces and forgets them."""

    def open(self, core_id: str, num_prompt: int, submitted_s: float) -> Trace:
        return Trace(core_id, num_prompt, submitted_s)

    forget = taken = waited = stepped = ended = nothing  # type: ignore[assignment]


class NoRecorder(StepRecorder):
    begin = waited = planned = ended = watch_threads = nothing  # type: ignore[assignment]


class NoMetrics:
    """Answers every call."""

    def __getattr__(self, name: str) -> Any:
        return self if name == "live" else nothing


class PlainRecord(RequestRecord):
    """Knows what the answer itself needs: counts, and when the first token was."""

    stage = submitted = blocked_by = ready = scheduled = nothing  # type: ignore[assignment]

    def tokens(self, choice: int, num_tokens: int) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic()
        self._num_output += num_tokens

    def close(self, status: int, outcome: str | None) -> FinishedRequest:
        return self._summary(status, outcome or "")


class Switch:
    """Exchanges the parts of a running engine and of every server in this process."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._parts = (core.traces, core._recorder, Service.record, Deliveries.watch)
        quiet = NoRecorder(core._scheduler, core.traces, core._backend.info.num_threads)
        metrics: Any = NoMetrics()
        self._none = (
            NoBook(),
            quiet,
            lambda service, exchange, salt: PlainRecord(
                metrics, nothing, exchange.path, exchange.request_id, exchange.arrival_s
            ),
            nothing,
        )

    def turn(self, *, on: bool) -> None:
        parts: Any = self._parts if on else self._none
        self._core.traces, self._core._recorder = parts[:2]
        Service.record, Deliveries.watch = parts[2:]  # type: ignore[method-assign]


class OpSwitch:
    """Turns the timing of ops on and off."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._is_on = False

    def turn(self, *, on: bool) -> None:
        if on != self._is_on:
            self._core.trace_ops(on)
            self._is_on = on


def client(url: str) -> int:
    """Runs a turn for every line on stdin (the number of streams): prints tokens per second and the median gap."""
    endpoint = Endpoint.parse(url)
    with asyncio.Runner() as runner:
        model = runner.run(served_model(endpoint))
        for line in sys.stdin:
            num = int(line)
            prompts = [Prompt(p.messages, TOKENS) for p in itertools.islice(prompt_source(0, TOKENS), num)]
            level = runner.run(run_level(endpoint, model, prompts, num, ignore_eos=True))
            assert not any(record.error for record in level.records), level.records[0].error
            gaps = [gap for record in level.records for gap in record.gaps_s]
            tokens = sum(record.completion_tokens for record in level.records)
            print(json.dumps([tokens / level.wall_s, statistics.median(gaps) * 1e3]), flush=True)
    return 0


def measure(model: str | None, num_streams: int, seconds: float, kind: type[Switch | OpSwitch]) -> list[list[float]]:
    """Rows of (tokens per second on, off, median gap in ms on, off, the server's CPU time per token in us on, off), one
    per pair of turns; on the fake backend where there is no model."""
    config = EngineConfig(model=model) if model else EngineConfig(backend="fake")
    load = load_parts if model else fake_parts
    with ServerThread(lambda: AsyncEngine(config, load=load), ServerConfig(port=0)) as server:
        switch = kind(server.engine._started()[1])
        command = [sys.executable, "-m", "benchmarks.recording", "--client", server.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
            assert started.stdin is not None
            assert started.stdout is not None
            send, answer = started.stdin, started.stdout

            def turn(*, on: bool) -> list[float]:
                time.sleep(SETTLE_S)
                switch.turn(on=on)
                cpu_s = time.process_time()
                send.write(f"{num_streams}\n")
                send.flush()
                figures: list[float] = json.loads(answer.readline())
                return [*figures, (time.process_time() - cpu_s) * 1e6 / (num_streams * TOKENS)]

            for on in (True, False, True):  # the prompts are cached, the step-time model knows such steps
                turn(on=on)
            pairs = _pairs(turn, time.monotonic() + seconds)
            switch.turn(on=True)
            send.close()
    return pairs


def _pairs(turn: Callable[..., list[float]], end_s: float) -> list[list[float]]:
    pairs = []
    for at in itertools.count():
        if time.monotonic() > end_s:
            return pairs
        order = (True, False) if at % 2 == 0 else (False, True)
        got = {on: turn(on=on) for on in order}
        pairs.append([got[on][at] for at in range(3) for on in (True, False)])
    raise AssertionError("unreachable")


def cost(pairs: list[list[float]]) -> dict[str, Any]:
    """Medians over pairs of on / off, and the quartiles of them divided by the root of their number, as a measure."""
    found: dict[str, Any] = {"pairs": len(pairs)}
    for at, name in enumerate(("throughput", "itl_p50", "cpu_us_per_token")):
        on, off = 2 * at, 2 * at + 1
        ratios = [pair[on] / pair[off] for pair in pairs]
        spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
        found[name] = {
            "on": statistics.median(pair[on] for pair in pairs),
            "off": statistics.median(pair[off] for pair in pairs),
            "ratio_median": statistics.median(ratios),
            "ratio_standard_error": spread,
            "difference_median": statistics.median(pair[on] - pair[off] for pair in pairs),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--ops", action="store_true")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.client:
        return client(arguments.client)
    if not arguments.out or bool(arguments.model) == arguments.fake:
        parser.error("give --out and MODEL, or --fake")
    levels: dict[str, Any] = json.loads(arguments.out.read_text())["levels"] if arguments.out.exists() else {}
    level = f"{'fake' if arguments.fake else Path(arguments.model).name}, {arguments.streams} streams"
    if arguments.ops:
        level += ", ops timed"
    known = levels.get(level, {"raw": []})["raw"]
    kind: type[Switch | OpSwitch] = OpSwitch if arguments.ops else Switch
    raw = known + measure(arguments.model, arguments.streams, arguments.seconds, kind)
    levels[level] = cost(raw) | {"raw": raw}
    document = conditions("benchmarks.recording", os.cpu_count() or 1)
    document["raw_columns"] = ["tok/s on", "off", "median gap ms on", "off", "CPU us per token on", "off"]
    write(document | {"tokens_per_answer": TOKENS, "levels": levels}, arguments.out)
    print(
        json.dumps({name: {k: v for k, v in found.items() if k != "raw"} for name, found in levels.items()}, indent=1)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
