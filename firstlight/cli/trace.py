"""`firstlight trace`: some seconds of a server's steps and requests, as a file that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path

from firstlight.cli.arguments import Invocation
from firstlight.cli.commands import TraceConfig
from firstlight.cli.console import note
from firstlight.cli.debug_client import fetched_json
from firstlight.errors import ConfigError

__all__ = ["run"]


def run(invocation: Invocation) -> int:
    """Waits while the server works, writes the file, prints its path."""
    config = invocation.config(TraceConfig)
    path = Path(config.output)
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"`output` {config.output}: its folder does not exist", param="output")
    note(f"tracing {config.url} for {config.seconds:g} s")
    found = fetched_json(config.url, f"/debug/trace?seconds={config.seconds:g}", config.api_key, config.seconds)
    path.write_text(json.dumps(found), "utf-8")
    num_steps = sum(event["ph"] == "X" and event["cat"] == "step" for event in found["traceEvents"]) // 4
    note(f"{num_steps} steps, {len(found['firstlight']['requests'])} requests: open it at ui.perfetto.dev,")
    note(f"or `firstlight explain --slowest 3 --trace-file {config.output}`")
    print(path)
    return 0
