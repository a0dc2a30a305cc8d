"""The commands and the options that belong to the terminal alone; the rest are in `firstlight.config`.

Imports nothing heavy: this is what `firstlight --help` loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.cli.arguments import Command
from firstlight.config import EngineConfig, ServerConfig, option

__all__ = [
    "BenchConfig",
    "COMMANDS",
    "CalibrateConfig",
    "ChatConfig",
    "DoctorConfig",
    "ExplainConfig",
    "PullConfig",
    "ServeConfig",
    "SimulateConfig",
    "TraceConfig",
    "TuneConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConfig:
    """What to fetch."""

    name: str = option(EngineConfig().model, "short name, or hf:org/name[:file]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where more of the options stand."""

    config: str = option(
        "", "TOML file with options by their long names (`max-step-rows = 32`); the command line wins", "FILE"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How the terminal's chat answers."""

    url: str = option("", "talk to this server; without it the model runs in this process")
    api_key: str = option("", "key that the server wants")
    system: str = option("", "system message that opens every conversation")
    temperature: float = option(0.7, "0 always takes the likeliest token")
    top_p: float = option(0.95, "sample from the likeliest tokens that make up this share")
    top_k: int = option(0, "sample from this many likeliest tokens; 0 = all", "tokens")
    min_p: float = option(0.0, "leave out tokens less likely than this share of the likeliest")
    max_tokens: int = option(0, "longest answer; 0 = up to the context's end", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What load to put on a server."""

    url: str = option("", "server to measure; without it one is started for the run with the engine options")
    api_key: str = option("", "key that the server wants")
    concurrency: tuple[int, ...] = option((1, 4, 8, 16), "streams open at a time, one level after the other")
    requests: int = option(0, "requests per level; 0 = twice the streams, at least 4", "requests")
    max_tokens: int = option(0, "length of every answer; 0 = drawn from 16 to 128", "tokens")
    ignore_eos: bool = option(True, "let every answer run to its full length, so that runs compare")
    load_seed: int = option(0, "which prompts and lengths are drawn")
    json: str = option("", "write everything, raw times included, to this file", "FILE")
    rate: float = option(0.0, "open loop: sessions that begin per second, whatever the server does", "PER_S")
    arrivals: str = option("poisson", "how an open loop's sessions begin", choices=("poisson", "fixed"))
    trace: str = option("", "replay this trace (JSONL, also .gz): times, lengths, shared blocks, think time", "FILE")
    trace_speed: float = option(1.0, "how many times faster than recorded a trace's times pass")
    prompts: str = option("", "open loop: conversations of this JSONL file (`turns` or `messages`)", "FILE")
    input_tokens: int = option(0, "open loop: synthetic prompts of about this length; a trace's longest", "tokens")
    prefix_tokens: int = option(0, "how much of a synthetic prompt all of them share", "tokens")
    repeats: int = option(1, "runs of the same load; from 2 on, figures have 95 % confidence intervals")
    slo: str = option("", "objectives that goodput counts, like ttft_p95=200ms,itl_p95=50ms")
    find_max: bool = option(False, "search the highest rate that meets --slo, beginning at --rate")
    compare: tuple[str, ...] = option((), "two servers, A,B: the same load on each in turn, and B's ratios to A")
    ladder: bool = option(False, "start this machine's engine with one technique more at a time, and compare")
    jsonl: str = option("", "write one line per request to this file", "FILE")
    html: str = option("", "write a page with tables and plots to this file", "FILE")
    png: str = option("", "write the plots to this file", "FILE")

    @property
    def is_open_loop(self) -> bool:
        """Whether sessions begin by a clock, not by the last answer's end."""
        return bool(self.rate or self.trace or self.find_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """What to examine."""

    model: str = option(EngineConfig().model, "model whose attainable speed is worked out")
    threads: int = option(0, "threads to measure with; 0 = as many as an engine would use")
    url: str = option("", "also measure the way to this server, proxies included")
    seconds: float = option(1.0, "time spent on each limit", "s")
    json: str = option("", "write everything to this file", "FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """Which request to explain."""

    id: str = option("", "its answer's id or X-Request-Id; without one, the last that ended")
    slowest: int = option(0, "explain so many of the slowest instead", "requests")
    last: bool = option(False, "explain the last that ended (what is done anyway)")
    by: str = option("e2e", "what makes one slow", choices=("e2e", "ttft", "gap"))
    url: str = option("http://127.0.0.1:8000", "server that served it")
    api_key: str = option("", "key that the server wants")
    trace_file: str = option("", "read this file of `firstlight trace` instead of a server", "FILE")
    json: bool = option(False, "print what was found as JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """What to record."""

    seconds: float = option(5.0, "how long to record, at most 60", "s")
    output: str = option("trace.json", "file to write", "FILE")
    url: str = option("http://127.0.0.1:8000", "server to record")
    api_key: str = option("", "key that the server wants")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """What to replay, and on what."""

    trace: str = option("", "recorded requests, JSONL or JSONL.gz", "FILE")
    hardware: str = option("", "hardware file or name (h100-8b, ...); without it only cache hits are counted", "FILE")
    policy: str = option(
        "conversation",
        "which cached blocks are kept; optimum reads the future",
        choices=("lru", "lfu", "s3fifo", "gdsf", "conversation", "optimum"),
    )
    cache_blocks: int = option(0, "blocks of the trace that a replica caches; 0 = what fits the hardware", "blocks")
    replicas: int = option(1, "engines that share the requests")
    routing: str = option(
        "prefix",
        "which replica gets a request: where most of it is cached, or in turn",
        choices=("prefix", "round-robin"),
    )
    mode: str = option(
        "continuous", "when requests may join, as in `serve`", choices=("continuous", "dynamic", "static")
    )
    batch_size: int = option(8, "requests in a batch of mode static or dynamic", "requests")
    itl_slo_ms: float = option(0.0, "longest gap between tokens a step may cause, as in `serve`", "ms")
    requests: int = option(0, "how many of the trace's requests; 0 = all", "requests")
    trace_speed: float = option(1.0, "times between arrivals are divided by this")
    slo: str = option("", "objectives for goodput, such as ttft_p95=500ms,itl_p95=50ms")
    json: bool = option(False, "print one JSON object instead of a table")
    html: str = option("", "write a page with tables and plots to this file", "FILE")
    png: str = option("", "write the plots to this file", "FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """Where to put what was measured."""

    output: str = option("hardware.json", "file to write, for `firstlight simulate --hardware`", "FILE")
    rounds: int = option(2, "times that every load is run, some 20 s each for a small model on two cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """What to serve how well, and where to write the settings for it."""

    workload: str = option(
        "chat", "what comes: chat (built in), synthetic, or a JSONL file of conversations or of a trace", "FILE"
    )
    slo: str = option("", "objectives to keep, like ttft_p95=200ms,itl_p95=50ms")
    requests: int = option(48, "sessions in a run of the load", "sessions")
    max_tokens: int = option(0, "length of every answer; 0 = what the workload says", "tokens")
    input_tokens: int = option(0, "length of synthetic prompts; a trace's longest", "tokens")
    prefix_tokens: int = option(0, "how much of a synthetic prompt all of them share", "tokens")
    arrivals: str = option("poisson", "how sessions begin; a trace has its own times", choices=("poisson", "fixed"))
    load_seed: int = option(0, "which prompts, lengths and times are drawn")
    live_runs: int = option(5, "most runs on a real server, 1 to 5; the simulator does the rest", "runs")
    space: str = option("", "settings to choose from, as max-step-rows=8,64;itl-slo-ms=0,25; empty = a usual choice")
    output: str = option("tuned.toml", "file to write, for `serve --config`; what was tried goes beside it", "FILE")
    journal: str = option("", "what was found so far, to go on from; empty = beside the output", "FILE")
    html: str = option("", "write a page with tables and plots to this file", "FILE")
    png: str = option("", "write the plots to this file", "FILE")


COMMANDS = (
    Command(
        "serve",
        "Serves a model over an OpenAI-compatible API.",
        "firstlight.cli.serve:run",
        (EngineConfig, ServerConfig, ServeConfig),
        "model",
    ),
    Command(
        "chat",
        "Talks with a model in this terminal.",
        "firstlight.cli.chat:run",
        (ChatConfig, EngineConfig),
        "model",
    ),
    Command("pull", "Fetches a model, so that it starts at once.", "firstlight.cli.pull:run", (PullConfig,), "name"),
    Command(
        "bench",
        "Measures a server under load.",
        "firstlight.cli.bench:run",
        (BenchConfig, EngineConfig),
        "url",
    ),
    Command(
        "doctor",
        "Measures this machine's limits, and says what is in the way.",
        "firstlight.cli.doctor:run",
        (DoctorConfig,),
        "model",
    ),
    Command(
        "explain",
        "Says where a request's time went, and what to change.",
        "firstlight.cli.explain:run",
        (ExplainConfig,),
        "id",
    ),
    Command(
        "trace",
        "Records a server's steps and requests for Perfetto.",
        "firstlight.cli.trace:run",
        (TraceConfig,),
    ),
    Command(
        "simulate",
        "Replays a recorded trace through scheduler and cache on a virtual clock.",
        "firstlight.cli.simulate:run",
        (SimulateConfig,),
        "trace",
    ),
    Command(
        "calibrate",
        "Measures what steps cost on this machine, for `simulate`.",
        "firstlight.cli.calibrate:run",
        (CalibrateConfig, EngineConfig),
        "model",
    ),
    Command(
        "tune",
        "Finds settings for a workload under objectives.",
        "firstlight.cli.tune:run",
        (TuneConfig, EngineConfig),
        "model",
    ),
    Command("version", "Says which version this is.", "firstlight.cli.version:run"),
)
