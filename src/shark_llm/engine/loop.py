"""The engine as the server sees it: submit, abort, drain, stop, stats.

any thread       submit, abort        -> inbox, under one lock
engine thread    inbox -> EngineCore -> sinks; sleeps on a condition while there is nothing to do
any thread       stats                <- the snapshot after the last step
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from dataclasses import replace

from shark_llm.engine.admission import check_request
from shark_llm.engine.core import EngineCore
from shark_llm.engine.request import Event, Request
from shark_llm.engine.settings import EngineSettings
from shark_llm.engine.stats import EngineStats
from shark_llm.errors import RequestError
from shark_llm.runtime.runner import ModelRunner

logger = logging.getLogger(__name__)


class Engine:
    """One thread that owns scheduler, pages and runner. All methods may be called from any thread.

    Sinks are called on the engine thread. The runner is closed by `stop`. Raises `UsageError` for
    settings that do not fit the runner.
    """

    def __init__(
        self, runner: ModelRunner, settings: EngineSettings, *, eos_token_ids: Collection[int]
    ) -> None:
        self._core = EngineCore(runner, settings, eos_token_ids=eos_token_ids)
        self._runner = runner
        self._settings = settings
        self._vocab_size = runner.vocab_size
        self._lock = threading.Lock()
        self._wakeup = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        # Under the lock:
        self._submitted: list[tuple[Request, float]] = []
        self._aborted: list[str] = []
        self._active: set[str] = set()  # accepted, no terminal event yet
        self._draining = False
        self._stopping = False
        self._failure: str | None = None
        self._stats = self._core.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together that a request may have."""
        return self._core.max_model_len

    @property
    def healthy(self) -> bool:
        """False: no new request is accepted, for the reason in `failure`."""
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """One line for anybody to read: why the engine is dead or starts nothing new; the log says
        more. None while it is healthy."""
        return self._failure

    @property
    def alive(self) -> bool:
        """The engine thread runs. A dead engine accepts nothing and has ended all its requests."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the engine thread. Requests submitted before have waited for it."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Accept a request: from here on its sink gets exactly one terminal event.

        Raises `RequestError`, and then calls no sink: status 400 with code context_length_exceeded
        (prompt + max_tokens > max_model_len), invalid_value (empty prompt, ids outside the
        vocabulary), duplicate_request_id; status 503 with code queue_full, draining, engine_dead.
        """
        check_request(request, vocab_size=self._vocab_size, max_model_len=self.max_model_len)
        settings = self._settings
        with self._lock:
            if self._failure is not None:
                raise RequestError(
                    "the engine has failed and takes no requests until it is restarted",
                    code="engine_dead",
                    status=503,
                )
            if self._draining or self._stopping:
                raise RequestError(
                    "the server is shutting down; try another one", code="draining", status=503
                )
            if request.request_id in self._active:
                raise RequestError(
                    f"request id {request.request_id!r} is in use; choose another",
                    param="request_id",
                    code="duplicate_request_id",
                )
            if len(self._active) >= settings.max_num_seqs + settings.max_num_queued_requests:
                raise RequestError(
                    f"{len(self._active)} requests run or wait, and the queue holds at most "
                    f"{settings.max_num_queued_requests} beyond the {settings.max_num_seqs} that "
                    "run; try again later",
                    code="queue_full",
                    status=503,
                )
            self._active.add(request.request_id)
            self._submitted.append((self._watched(request), time.monotonic()))
            self._wakeup.notify()

    def abort(self, request_id: str) -> bool:
        """End a request with FinishEvent("abort"), before the next step begins.

        False: no such request is active, which is no error: it may have just ended.
        """
        with self._lock:
            if request_id not in self._active:
                return False
            self._aborted.append(request_id)
            self._wakeup.notify()
            return True

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until all accepted ones have ended.

        `timeout` in seconds; None waits for ever. False: time was up, the rest still runs.
        """
        with self._lock:
            self._draining = True
            return self._idle.wait_for(lambda: not self._active, timeout)

    def stop(self) -> None:
        """Abort what is left, end the thread, close the runner. Idempotent; not from a sink."""
        with self._lock:
            self._stopping = True
            self._wakeup.notify()
        if self._thread.ident is None:
            self._shut_down()  # never started: nobody else will
        else:
            self._thread.join()

    def stats(self) -> EngineStats:
        """The snapshot taken after the last step, and the requests submitted since."""
        with self._lock:
            submitted = len(self._submitted)
            stats = self._stats
        return replace(
            stats,
            waiting=stats.waiting + submitted,
            requests_accepted=stats.requests_accepted + submitted,
        )

    def _watched(self, request: Request) -> Request:
        """The same request, which leaves `_active` with its terminal event."""
        sink = request.sink

        def watch(event: Event) -> None:
            try:
                sink(event)
            finally:
                if event.is_terminal:
                    with self._lock:
                        self._active.discard(request.request_id)
                        if not self._active:
                            self._idle.notify_all()

        return replace(request, sink=watch)

    def _run(self) -> None:
        core = self._core
        try:
            while self._take_in():
                if core.has_requests:
                    core.step()
                else:
                    core.flush()
                self._publish()
                if core.failure is not None:
                    return
        except Exception as error:
            # A fault of our own. Nobody may wait for ever because of it.
            logger.critical("the engine thread failed", exc_info=error)
            core.failure = f"the engine failed with {type(error).__name__}"
        finally:
            self._shut_down()

    def _take_in(self) -> bool:
        """Wait for something to do and bring the inbox into the core. False: stop."""
        core = self._core
        with self._lock:
            while not (self._submitted or self._aborted or self._stopping or core.has_requests):
                self._wakeup.wait()
            if self._stopping:
                return False
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, []
        for request, time_submitted in submitted:
            core.add(request, submitted=time_submitted)
        for request_id in aborted:
            core.abort(request_id)
        return True

    def _publish(self) -> None:
        core = self._core
        stats = core.stats()
        with self._lock:
            self._stats = stats
            self._failure = core.failure or core.breach

    def _shut_down(self) -> None:
        """End every request that is left, one way or the other, and give the device back."""
        core = self._core
        with self._lock:
            self._stopping = True
            self._failure = core.failure or core.breach
            submitted, self._submitted = self._submitted, []
        for request, time_submitted in submitted:
            core.add(request, submitted=time_submitted)
        if core.failure is not None:
            core.fail_all(core.failure)
        else:
            core.abort_all()
        core.flush()
        self._publish()
        self._runner.close()
