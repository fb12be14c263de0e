"""The engine as the server sees it: submit, abort, drain, stop, stats. Interface only in this commit."""

from __future__ import annotations

from collections.abc import Collection

from shark_llm.engine.request import Request
from shark_llm.engine.settings import EngineSettings
from shark_llm.engine.stats import EngineStats
from shark_llm.runtime.runner import ModelRunner


class Engine:
    """One thread that owns scheduler, pages and runner. All public methods may be called from any thread.

    `sink` of a request is called on the engine thread.
    """

    def __init__(
        self, runner: ModelRunner, settings: EngineSettings, *, eos_token_ids: Collection[int]
    ) -> None: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together that a request may have."""
        raise NotImplementedError

    @property
    def healthy(self) -> bool:
        """False: no new request is accepted, for the reason in `failure`."""
        raise NotImplementedError

    @property
    def failure(self) -> str | None:
        """One line: why the engine is dead or takes nothing more. None while it is healthy."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the engine thread."""
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        """Accept a request: from here on its sink gets exactly one terminal event.

        Raises RequestError, and then calls no sink: status 400 with code context_length_exceeded
        (prompt + max_tokens > max_model_len), invalid_value (empty prompt, ids outside the
        vocabulary), duplicate_request_id; status 503 with code queue_full, draining, engine_dead.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """End a request with FinishEvent("abort"). False: no such request is active (no error)."""
        raise NotImplementedError

    def drain(self, timeout: float | None) -> bool:
        """Refuse new requests and wait until all accepted ones have ended. False: time was up."""
        raise NotImplementedError

    def stop(self) -> None:
        """Abort what is left, end the thread, close the runner. Idempotent."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """The snapshot taken after the last step."""
        raise NotImplementedError
