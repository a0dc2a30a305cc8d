"""The commands and the options that belong to the terminal alone; the rest are in `firstlight.config`.

Imports nothing heavy: this is what `firstlight --help` loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.cli.arguments import Command
from firstlight.config import EngineConfig, ServerConfig, option

__all__ = ["COMMANDS", "BenchConfig", "ChatConfig", "PullConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullConfig:
    """What to fetch."""

    name: str = option(EngineConfig().model, "short name, or hf:org/name[:file]")


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


COMMANDS = (
    Command(
        "serve",
        "Serves a model over an OpenAI-compatible API.",
        "firstlight.cli.serve:run",
        (EngineConfig, ServerConfig),
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
        "Measures a server under a short closed-loop load.",
        "firstlight.cli.bench:run",
        (BenchConfig, EngineConfig),
        "url",
    ),
    Command("version", "Says which version this is.", "firstlight.cli.version:run"),
)
