"""Every option of engine and server: frozen dataclasses. Flags and docs are generated from the field metadata.

Knows values and their limits, not where they came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["EngineConfig", "ServerConfig", "option"]


def option(default: Any, text: str, unit: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that carries its one help sentence, its unit and its allowed values."""
    return field(default=default, metadata={"help": text, "unit": unit, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. 0 means: choose for this machine."""

    model: str = option("smollm2-135m", "GGUF file, Hugging Face folder, hf:org/name[:file], or a short name")
    backend: str = option("cpu", "where the model runs", choices=("cpu", "fake"))
    threads: int = option(0, "compute threads; 0 = one per physical core this process may use")
    block_size: int = option(
        16,
        "tokens per KV block",
        "tokens",
    )
    kv_memory_mb: int = option(
        0, "memory for KV blocks; 0 = enough for 4 full contexts, at most a quarter of free memory", "MB"
    )
    num_blocks: int = option(0, "KV blocks; overrides kv_memory_mb when above 0", "blocks")
    max_model_len: int = option(0, "longest prompt + output; 0 = what the model was trained for", "tokens")
    max_step_rows: int = option(64, "requests that may run in one step", "rows")
    max_step_tokens: int = option(512, "tokens computed in one step", "tokens")
    prefix_cache: bool = option(True, "reuse the KV of full blocks that an earlier request computed")
    shared_prefix: tuple[str, ...] = option(
        (), "text files with system prompts whose KV all API keys share; computed at start and pinned"
    )
    pin_memory_mb: int = option(0, "KV memory that pinned prefixes may hold; 0 = an eighth of the KV blocks", "MB")
    eviction: str = option(
        "lru",
        "which cached blocks are kept when memory is short: docs/caching.md compares them",
        choices=("lru", "lfu", "s3fifo", "gdsf", "conversation"),
    )
    host_cache_mb: int = option(0, "host memory for KV blocks that were evicted; 0 = none", "MB")
    disk_cache: str = option("", "directory for KV blocks that host memory has no room for; they survive a restart")
    disk_cache_mb: int = option(4096, "what the directory may hold", "MB")
    audit_share: float = option(
        0.01, "share of idle time in which cached blocks are computed again and compared; 0 = none"
    )
    itl_slo_ms: float = option(
        0.0, "longest gap between tokens a step may cause; 0 = a multiple of this machine's decode step", "ms"
    )
    max_queue: int = option(1024, "requests that may wait", "requests")
    max_queue_s: float = option(600.0, "predicted time a request may wait before it is refused; 0 = any", "s")
    mode: str = option(
        "continuous",
        "when requests may join: at any step, or as batches that run to their last request's end",
        choices=("continuous", "dynamic", "static"),
    )
    batch_size: int = option(8, "requests in a batch of mode static or dynamic", "requests")
    batch_wait_ms: float = option(
        0.0, "longest wait for a batch to fill; 0 = 2,000 in mode static, 50 in mode dynamic", "ms"
    )
    reserve_output: bool = option(True, "admit a request only where its predicted output will find KV blocks too")
    preempt: str = option(
        "least-work",
        "who gives way when KV blocks run out: least work to compute again, or last in",
        choices=("least-work", "last-in"),
    )
    speculate: str = option(
        "off",
        "guess tokens that stood in the text before and check them, where that saves time; no answer changes",
        choices=("lookup", "off"),
    )
    watchdog_s: float = option(
        60.0, "open requests and no step for this long: end them with an error and restart the core; 0 = never", "s"
    )
    max_restarts: int = option(3, "times in 10 minutes that a failed core is loaded again before the server gives up")
    seed: int = option(0, "base of the seeds drawn for requests that bring none")
    max_grammar_kb: int = option(256, "largest JSON schema, regular expression or grammar of a request", "KB")
    max_grammar_depth: int = option(96, "deepest nesting of objects and lists in a JSON schema", "levels")
    grammar_compile_s: float = option(5.0, "longest time a grammar may take to compile", "s")
    grammar_cache: int = option(256, "compiled grammars kept for the next request that brings the same", "grammars")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the HTTP server is reached and what it takes from a client."""

    host: str = option("127.0.0.1", "address to bind; 0.0.0.0 takes requests from other machines")
    port: int = option(8000, "port to bind; 0 = any free one")
    served_model_name: str = option("", "name clients use for the model; empty = the engine's name for it")
    model_aliases: tuple[str, ...] = option((), "more names that clients may use for the same model")
    api_key: tuple[str, ...] = option((), "keys that clients must send as a bearer token; none = no key is needed")
    api_key_file: str = option(
        "", "file with a key, or sha256: and its digest, per line, then its own limits (concurrency=4); # is a comment"
    )
    key_requests_per_min: int = option(0, "requests a minute of one API key; 0 = any", "requests")
    key_tokens_per_min: int = option(0, "prompt and output tokens a minute of one API key; 0 = any", "tokens")
    key_concurrency: int = option(0, "requests of one API key that are answered at a time; 0 = any", "requests")
    key_queued: int = option(0, "open sequences (prompts times n) of one API key, its share of the queue; 0 = any")
    cors_origins: tuple[str, ...] = option((), "web origins that may call from a browser; * = any")
    tls_cert: str = option("", "PEM file with the server's certificate chain: serve https")
    tls_key: str = option("", "PEM file with the certificate's private key; empty = it is in tls_cert")
    max_body_mb: float = option(16.0, "largest request body", "MB")
    max_header_kb: int = option(32, "largest request line and headers together", "KB")
    tool_parser: str = option(
        "auto",
        "how the model writes tool calls; auto = what its chat template shows",
        choices=("auto", "hermes", "llama3", "mistral", "smollm2"),
    )
    reasoning_parser: str = option(
        "auto",
        "what stands between <think> and </think> is reasoning; auto = if the chat template knows <think>",
        choices=("auto", "think", "none"),
    )
    max_tools: int = option(128, "most functions in one request (`tools`)", "functions")
    max_n: int = option(16, "most answers per prompt (`n`)")
    max_prompts: int = option(128, "most prompts in one completions request")
    max_pin_s: float = option(3600.0, "longest time a request may pin its prefix (`cache_control`); 0 = none", "s")
    read_timeout_s: float = option(60.0, "longest time a client may take to send headers or body", "s")
    idle_timeout_s: float = option(75.0, "how long a connection without a request stays open", "s")
    stream_interval: int = option(1, "tokens of a choice that leave in one frame; its first text never waits", "tokens")
    coalesce_ms: float = option(0.0, "gather a stream's tokens into one frame for this long; 0 = do not", "ms")
    pace_ms: float = option(
        0.0, "hold tokens for at most this long to even out a stream's gaps (request field pace_ms); 0 = do not", "ms"
    )
    resume_s: float = option(
        0.0, "how long a stream goes on without its client, which may resume it (Last-Event-ID); 0 = ends at once", "s"
    )
    resume_mb: float = option(64.0, "events kept of all streams, for those that are resumed", "MB")
    keep_alive_s: float = option(5.0, "gap between keep-alive comments on a stream that has no token yet", "s")
    slow_ttft_ms: float = option(
        1000.0, "a request whose first token takes longer is kept longer for `firstlight explain`", "ms"
    )
    slow_gap_ms: float = option(500.0, "so is one with a longer gap between tokens", "ms")
    otlp_endpoint: str = option(
        "",
        "OpenTelemetry collector that gets a span per request, as http://127.0.0.1:4318 (extra `otel`)",
    )
    slow_reader_s: float = option(300.0, "how long a client may take nothing of what its stream has sent", "s")
    dead_peer_s: float = option(
        30.0, "a client whose machine answers nothing at all, not even TCP's probes, for this long is gone", "s"
    )
    stall_s: float = option(30.0, "waiting work and no step for this long makes the server not ready", "s")
    drain_s: float = option(30.0, "how long open requests may run on after SIGTERM or Ctrl-C", "s")
    debug_routes: str = option("auto", "/debug/*: auto = only on a loopback address", choices=("auto", "on", "off"))
