"""Real servers on port 0 over the fake backend, each on a thread, and ways to talk to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from firstlight.backend.fake import StepCost
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.server.run import ServerThread
from tests.server.raw import close_all_connected

StartServer = Callable[..., ServerThread]


@pytest.fixture(autouse=True)
def no_connection_outlives_its_test() -> Iterator[None]:
    """Closes what a test has opened with `connected`, however the test ended."""
    yield
    close_all_connected()


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """Starts a server that lives as long as the module's tests.

    Takes options of ServerConfig; `engine` holds options of EngineConfig, `backend` those of FakeBackend.
    """
    with contextlib.ExitStack() as stack:

        def start(
            engine: dict[str, Any] | None = None, backend: dict[str, Any] | None = None, **options: Any
        ) -> ServerThread:
            config = EngineConfig(backend="fake", **engine or {})

            def build() -> AsyncEngine:
                return AsyncEngine(config, load=lambda config: fake_parts(config, **backend or {}))

            return stack.enter_context(ServerThread(build, ServerConfig(port=0, **options)))

        yield start


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> ServerThread:
    """A fast server with the default options."""
    return start_server()


@pytest.fixture(scope="module")
def slow_server(start_server: StartServer) -> ServerThread:
    """A server whose steps take 5 ms, and whose limits on quiet and unread streams are short."""
    return start_server(backend={"cost": StepCost(step_s=0.005)}, keep_alive_s=0.05)


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    """A plain HTTP client of `server`."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(server: ServerThread) -> Iterator[openai.OpenAI]:
    """The stock client of `server`."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client
