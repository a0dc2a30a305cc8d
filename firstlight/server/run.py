"""The server as a process: one listening socket, uvicorn on uvloop, signals that drain first and stop second.

Knows processes and signals, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from firstlight.config import ServerConfig
from firstlight.engine.frontend import AsyncEngine
from firstlight.errors import BackendError, ConfigError
from firstlight.measure.log import log_event, log_to_stderr
from firstlight.server.app import create_app
from firstlight.server.protocol import bounded_protocol
from firstlight.server.service import Service
from firstlight.server.sockets import notice_dead_peers

__all__ = ["RunningServer", "ServerThread", "serve"]

EngineFactory = Callable[[], AsyncEngine]
OnReady = Callable[[AsyncEngine, str], None]

_FLUSH_S = 2
"""How long connections may take to send what is left once the engine is closed."""
_START_POLL_S = 0.005
_BACKLOG = 1024
_SEND_BUFFER_BYTES = 128 * 1024
"""Per connection in the kernel, which would grow it to megabytes: a client that does not read should be noticed."""


def serve(engine_factory: EngineFactory, config: ServerConfig, on_ready: OnReady | None = None) -> None:
    """Serves until SIGTERM or Ctrl-C, then drains; a second signal stops at once.

    The socket is bound before the model loads, so /health answers and /ready says 503 meanwhile.

    Args:
        on_ready: called once with the warm engine and the server's URL.

    Raises:
        ConfigError: an option is wrong, the address cannot be bound, or the model cannot be loaded.
        BackendError: the engine failed during warm-up.
    """
    log_to_stderr()
    server = RunningServer(engine_factory, config, on_ready)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner, _stopping_on_signals(runner.get_loop(), server):
        runner.run(server.run())


class RunningServer:
    """One server from bind to close. Every method but `request_stop` is called on its loop.

    Args:
        engine_factory: builds the engine; called on the loop, must not load the model (`AsyncEngine.start` does).
    """

    def __init__(self, engine_factory: EngineFactory, config: ServerConfig, on_ready: OnReady | None = None) -> None:
        self._engine_factory = engine_factory
        self._config = config
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self.url = ""
        """Where it listens; set before the model loads."""
        self.engine: AsyncEngine | None = None

    def request_stop(self) -> None:
        """Drains; the second call stops at once. Call it on the loop (from elsewhere with `call_soon_threadsafe`)."""
        if self._stop.is_set():
            self._stop_now.set()
        else:
            log_event("draining", drain_s=self._config.drain_s, hint="again to stop at once")
        self._stop.set()

    async def run(self) -> None:
        """Serves until `request_stop`. Raises as `serve` does."""
        _check_tls(self._config)
        sock = _bound_socket(self._config)
        with contextlib.closing(sock):
            self.url = _url(self._config, sock)
            self.engine = engine = self._engine_factory()
            app = create_app(engine, self._config)
            server = _HttpServer(_uvicorn_config(app, self._config))
            listening = asyncio.create_task(server.serve(sockets=[sock]))
            try:
                await self._started(engine, app.service, server, listening)
                await self._until_stopped(listening)
            finally:
                await self._closed(engine, app.service, server, listening)

    async def _started(
        self, engine: AsyncEngine, service: Service, server: uvicorn.Server, listening: asyncio.Task[None]
    ) -> None:
        while not server.started:
            if listening.done():
                raise BackendError(f"the HTTP server ended at start: {listening.exception()}")
            await asyncio.sleep(_START_POLL_S)
        log_event("listening", url=self.url)
        loading = asyncio.create_task(engine.start())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            return
        loading.result()
        await asyncio.to_thread(service.warm_up)
        log_event("ready", url=self.url, model=engine.info.model)
        if self._on_ready is not None:
            self._on_ready(engine, self.url)

    async def _until_stopped(self, listening: asyncio.Task[None]) -> None:
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stop, listening}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()

    async def _closed(
        self, engine: AsyncEngine, service: Service, server: uvicorn.Server, listening: asyncio.Task[None]
    ) -> None:
        """Drains the engine while the socket still answers 503, then closes the connections."""
        drain = asyncio.create_task(engine.close(self._config.drain_s))
        hurry = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if hurry.done() or drain.cancelled():
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
            server.force_exit = True
            await engine.close(0.0)
        hurry.cancel()
        server.should_exit = True
        await asyncio.gather(listening, return_exceptions=True)
        service.close()
        log_event("stopped", url=self.url)


class ServerThread:
    """A server on a thread of its own, for tests and in-process load: a context manager that is ready when entered.

    Raises:
        What `serve` raises, on entering.
    """

    def __init__(self, engine_factory: EngineFactory, config: ServerConfig) -> None:
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._server = RunningServer(engine_factory, config, lambda engine, url: self._ready.set())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="firstlight-server", daemon=True)

    @property
    def url(self) -> str:
        """The address, without a path."""
        return self._server.url

    @property
    def engine(self) -> AsyncEngine:
        """The engine behind it."""
        assert self._server.engine is not None
        return self._server.engine

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop it runs on."""
        assert self._loop is not None
        return self._loop

    def request_stop(self) -> None:
        """Drains; the second call stops at once."""
        self.loop.call_soon_threadsafe(self._server.request_stop)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the server; whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> ServerThread:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop may close between the two lines
                self.request_stop()
                self.request_stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                self._loop = runner.get_loop()
                runner.run(self._server.run())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain the engine first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: Any, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded_protocol(config.max_header_kb * 1000, config.read_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=max(1, round(config.idle_timeout_s)),
        timeout_graceful_shutdown=_FLUSH_S,
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
    )


def _bound_socket(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises ConfigError where the address is wrong or taken."""
    if not 0 <= config.port < 65536:
        raise ConfigError(f"`port` is {config.port}: it must be from 0 to 65535", param="port")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"`host` {config.host!r} port {config.port} is no address: {error}", param="host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        notice_dead_peers(sock, config.dead_peer_s)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error}", param="port", hint="choose another with --port"
        ) from None
    return sock


def _url(config: ServerConfig, sock: socket.socket) -> str:
    host, port = config.host, sock.getsockname()[1]
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_tls(config: ServerConfig) -> None:
    """Raises ConfigError for files that are no certificate and key: the HTTP server would say so too late."""
    if not config.tls_cert:
        if config.tls_key:
            raise ConfigError("`tls_key` needs `tls_cert`: give the certificate too", param="tls_key")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key or None, lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"`tls_cert` {config.tls_cert!r} with `tls_key` {config.tls_key!r} cannot be used: {error}",
            param="tls_cert",
        ) from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


@contextlib.contextmanager
def _stopping_on_signals(loop: asyncio.AbstractEventLoop, server: RunningServer) -> Iterator[None]:
    """SIGINT and SIGTERM call `server.request_stop` while the block runs."""
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, server.request_stop)
    try:
        yield
    finally:
        if not loop.is_closed():
            for number in signals:
                loop.remove_signal_handler(number)
