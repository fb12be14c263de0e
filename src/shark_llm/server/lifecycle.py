"""The life of the server: listen, load, serve, drain, leave.

    bind       the port is taken first; one that is in use is refused before anything is loaded
    loading    /health says 503 with the phase; a failure ends the process with the loader's error
    ready      a first token has been made; the engine is watched
    draining   SIGTERM or SIGINT: new calls 503, running ones may finish within shutdown_timeout
    dead       the engine died: 503 everywhere for `dead_linger` seconds, then exit code 1

A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

import uvicorn

from shark_llm.engine.request import ErrorEvent, Event, FinishEvent, Request, SamplingParams
from shark_llm.errors import RequestError, SharkError, UsageError
from shark_llm.server.app import create_app
from shark_llm.server.connections import PatientConnection
from shark_llm.server.metrics import Metrics
from shark_llm.server.settings import ServerSettings
from shark_llm.server.state import EnginePort, ServedModel, ServerState

logger = logging.getLogger("shark_llm.server")


class Report(Protocol):
    """How a loader says what it is doing, and how far it is, in percent; /health shows it."""

    def __call__(self, detail: str, percent: float | None = None) -> None: ...


_TICK = 0.1  # seconds between two looks at the engine, and at what still runs while draining
_KEEP_ALIVE = 30  # longer than the pools of common clients, which else meet a closing connection
_STOP_TIMEOUT = 10  # for the step that the device is in
_FLUSH_TIMEOUT = 5  # for answers that are complete but not read when the server leaves


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What the loader returns: the model, and one line about it for the operator."""

    served: ServedModel
    summary: str


Loader = Callable[[Report], Loaded]
"""Loads the model on a thread of its own. It may raise `SharkError`."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        UsageError: the port is in use, not allowed, or the host is not ours.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"port is {port}; it must be in 0..65535 (0 = any free port)")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # It must listen, not only be bound: two sockets that do not listen can share a port.
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot listen on {host} port {port}: {reason.lower()}; stop what uses it, or choose "
            "another --host or --port (0 = any free port)"
        ) from error


def url_of(sock: socket.socket) -> str:
    """The address that a client types; a wildcard is shown as the loopback."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(settings: ServerSettings, load: Loader, sock: socket.socket) -> int:
    """Serve on a socket from `bind` until told to stop; returns the process's exit code.

    Raises:
        SharkError: what the loader raised.
    """
    return asyncio.run(Life(settings, sock, load).run(handle_signals=True))


class Life:
    """One server from its socket to its end."""

    def __init__(self, settings: ServerSettings, sock: socket.socket, load: Loader) -> None:
        self.settings = settings
        self.state = ServerState()
        self.url = url_of(sock)
        self._metrics = Metrics(settings.served_model_name)
        self._sock = sock
        self._load = load
        self._owns_process = False
        self._stop = asyncio.Event()
        self._signals = 0

    def request_stop(self) -> None:
        """Begin to drain; to be called on the event loop. The second call ends the process."""
        self._signals += 1
        self._stop.set()

    async def run(self, *, handle_signals: bool) -> int:
        """The whole life. Exit code 0 after a stop, 1 after the engine's death."""
        app = create_app(self.settings, self.state, self._metrics)
        config = uvicorn.Config(
            app,
            http=PatientConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_FLUSH_TIMEOUT,
        )
        server = _Server(config)
        self._owns_process = handle_signals
        if handle_signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
        logger.info("listening on %s, loading", self.url)
        serving = asyncio.create_task(server.serve(sockets=[self._sock]))
        try:
            return await self._load_and_watch(serving)
        finally:
            server.should_exit = True
            await serving
            if self.state.served is not None:
                await self._stop_engine(self.state.served.engine)

    async def _load_and_watch(self, serving: asyncio.Task[None]) -> int:
        loading = self._start_loading()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # raises what ended it
            return 1
        if not loading.done():
            self.state.phase, self.state.detail = "draining", "stopped while loading"
            logger.info("stopped while loading")
            if self._owns_process:
                # The loader cannot be interrupted, and leaves nothing that is not complete.
                _leave_now(0)
        loaded = await loading
        engine = loaded.served.engine
        self._metrics.watch(engine.stats)
        self.state.become_ready(loaded.served)
        print(f"shark-serve: ready at {self.url}  {loaded.summary}", flush=True)
        await self._watch(engine, stopping)
        if not self._stop.is_set():
            return await self._mourn(engine, stopping)
        await self._drain()
        if engine.failure is not None:
            logger.error("the engine failed before it was done: %s", engine.failure)
            return 1
        return 0

    def _start_loading(self) -> asyncio.Future[Loaded]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Loaded] = loop.create_future()

        def settle(loaded: Loaded | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if loaded is not None:
                future.set_result(loaded)
            elif error is not None:
                future.set_exception(error)

        def work() -> None:
            try:
                loaded = self._load(self.state.report)
                self.state.report("making the first token")
                try:
                    make_first_token(loaded.served.engine)
                except SharkError:
                    loaded.served.engine.stop()
                    raise
            except BaseException as error:  # handed to whoever awaits the future
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, loaded, None)

        # A daemon: a stop while loading must not wait for it.
        threading.Thread(target=work, name="shark-load", daemon=True).start()
        return future

    async def _watch(self, engine: EnginePort, stopping: asyncio.Task[bool]) -> None:
        """Return when the engine has died or a stop was asked for."""
        steps, since = -1, time.monotonic()
        while engine.healthy and engine.alive and not stopping.done():
            now, done = time.monotonic(), engine.stats().steps
            # What runs is asked here: the engine's snapshot is as old as its last step.
            if done != steps or not self.state.engine_is_busy:
                steps, since = done, now
            self.state.stalled = now - since > self.settings.stall_timeout
            await asyncio.wait((stopping,), timeout=_TICK)
        self.state.stalled = False

    async def _mourn(self, engine: EnginePort, stopping: asyncio.Task[bool]) -> int:
        self.state.phase, self.state.detail = "dead", engine.failure or "it stopped"
        logger.error("the engine takes no more requests: %s", self.state.detail)
        # It may be unable to begin anything and yet finish what runs.
        while engine.alive and self.state.num_active and not stopping.done():
            await asyncio.wait((stopping,), timeout=_TICK)
        # Open streams get their error, and health checks see why, before the port closes.
        await asyncio.wait((stopping,), timeout=self.settings.dead_linger)
        return 1

    async def _stop_engine(self, engine: EnginePort) -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            engine.stop()
            loop.call_soon_threadsafe(stopped.set)

        threading.Thread(target=work, name="shark-stop", daemon=True).start()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await stopped.wait()
        except TimeoutError:
            logger.error("the engine does not stop within %d s; leaving anyway", _STOP_TIMEOUT)
            if self._owns_process:
                _leave_now(1)

    async def _drain(self) -> None:
        self.state.phase, self.state.detail = "draining", "finishing running requests"
        logger.info(
            "shutting down: %d running requests have %g s to finish",
            self.state.num_active,
            self.settings.shutdown_timeout,
        )
        deadline = time.monotonic() + self.settings.shutdown_timeout
        while self.state.num_active and time.monotonic() < deadline:
            await asyncio.sleep(_TICK)
        if self.state.num_active:
            logger.warning("time is up: %d requests are aborted", self.state.num_active)
            self.state.abort_all()

    def _on_signal(self, number: int) -> None:
        self.request_stop()
        if self._signals > 1:
            logger.warning("second signal: leaving now")
            _leave_now(128 + number)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: a drain comes before its shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_first_token(engine: EnginePort) -> None:
    """Wait until the engine has made tokens: by prefill, and by decode if two fit.

    Raises:
        SharkError: it could not.
    """
    done = threading.Event()
    events: list[Event] = []

    def sink(event: Event) -> None:
        events.append(event)
        if isinstance(event, FinishEvent | ErrorEvent):
            done.set()

    # A prompt of one token would run as a decode row alone.
    size = 2 if engine.max_model_len >= 4 else 1
    sampling = SamplingParams(max_tokens=size, temperature=0.0, ignore_eos=True)
    request = Request(
        request_id="first-token", prompt_ids=(0,) * size, sampling=sampling, sink=sink
    )
    try:
        engine.submit(request)
    except RequestError as error:
        raise SharkError(f"the engine takes no request: {error}") from error
    done.wait()
    last = events[-1]
    if isinstance(last, ErrorEvent):
        raise SharkError(f"the model cannot make a token: {last.message}")


def _leave_now(code: int) -> NoReturn:
    """End the process without waiting for threads that are inside the device or the loader."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
