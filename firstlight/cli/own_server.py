"""A `firstlight serve` of our own, as a process: ready on entry, gone on exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

from firstlight.cli.arguments import flag_of
from firstlight.cli.console import dim, note
from firstlight.errors import ConfigError, FirstlightError
from firstlight.measure.client import Endpoint, get_json

__all__ = ["own_server"]

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0


@contextlib.contextmanager
def own_server(engine_options: dict[str, object]) -> Iterator[Endpoint]:
    """A `firstlight serve` on a free port, ready on entry, gone on exit."""
    port = _free_port()
    arguments = [sys.executable, "-m", "firstlight", "serve", "--host", "127.0.0.1", "--port", str(port)]
    for name, value in engine_options.items():
        if isinstance(value, bool):
            arguments.append(flag_of(name) if value else "--no-" + flag_of(name)[2:])
        else:
            arguments += [flag_of(name) if name != "model" else "", str(value)]
    note(dim("starting a server for the run"))
    with tempfile.TemporaryFile("w+") as log:
        # A group of its own: Ctrl-C in the terminal reaches this program alone, which then stops the server.
        server = subprocess.Popen(
            [argument for argument in arguments if argument],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
        endpoint = Endpoint("127.0.0.1", port)
        try:
            _wait_until_ready(endpoint, server, log)
            yield endpoint
        finally:
            server.terminate()
            try:
                server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_ready(endpoint: Endpoint, server: subprocess.Popen[bytes], log: IO[str]) -> None:
    end_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end_s:
        if server.poll() is not None:
            log.seek(0)
            raise ConfigError(f"the server ended with code {server.returncode}:\n{log.read().strip()}")
        with contextlib.suppress(FirstlightError):
            asyncio.run(get_json(endpoint, "/ready"))
            return
        time.sleep(0.05)
    raise ConfigError(f"the server was not ready after {_START_TIMEOUT_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
