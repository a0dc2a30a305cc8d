"""`firstlight serve`: the server, and one screen that says what it runs on."""

from __future__ import annotations

import time
from dataclasses import dataclass

from firstlight.cli.arguments import Invocation
from firstlight.cli.commands import ServeConfig
from firstlight.cli.config_file import with_file
from firstlight.cli.console import bold, note
from firstlight.cli.download import fetch_if_missing
from firstlight.cli.startup import StartupFacts, render_startup
from firstlight.cli.version import package_version
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.frontend import AsyncEngine
from firstlight.engine.load import EngineParts, load_parts
from firstlight.server.run import serve

__all__ = ["run"]


@dataclass(slots=True)
class _TimedLoad:
    """Loads as the engine would, and remembers when it was done. Written by the loading thread, read after it."""

    begin_s: float
    end_s: float = 0.0
    parts: EngineParts | None = None

    def __call__(self, config: EngineConfig) -> EngineParts:
        self.parts = load_parts(config)
        self.end_s = time.perf_counter()
        return self.parts


def run(invocation: Invocation) -> int:
    """Serves until it is told to stop; 0 after an orderly stop."""
    if path := invocation.config(ServeConfig).config:
        invocation = with_file(invocation, path, (EngineConfig, ServerConfig))
    engine_config, server_config = invocation.config(EngineConfig), invocation.config(ServerConfig)
    if engine_config.backend != "fake":
        fetch_if_missing(engine_config.model)
    load = _TimedLoad(time.perf_counter())

    def announce(engine: AsyncEngine, url: str) -> None:
        first, _, rest = render_startup(_facts(engine, url, load, server_config)).partition("\n")
        note(f"{bold(first)}\n{rest}")

    serve(lambda: AsyncEngine(engine_config, load=load), server_config, announce)
    return 0


def _facts(engine: AsyncEngine, url: str, load: _TimedLoad, config: ServerConfig) -> StartupFacts:
    parts = load.parts
    assert parts is not None
    return StartupFacts(
        version=package_version(),
        model=config.served_model_name or engine.info.model,
        backend=engine.info.backend,
        num_parameters=parts.num_parameters,
        file_bytes=parts.file_bytes,
        url=url,
        load_s=load.end_s - load.begin_s,
        warm_up_s=time.perf_counter() - load.end_s,
        needs_key=bool(config.api_key or config.api_key_file),
    )
