"""What the whole server shares: the phase of its life, the served model, the calls in flight."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from shark_llm.engine.guidance import GrammarCompiler
from shark_llm.engine.request import Request
from shark_llm.engine.stats import EngineStats
from shark_llm.errors import RequestError
from shark_llm.server.chat_template import ChatTemplate
from shark_llm.server.errors import shorten
from shark_llm.server.params import SamplingDefaults
from shark_llm.server.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from shark_llm.server.generation import Generation

Phase = Literal["loading", "ready", "draining", "dead"]


class EnginePort(Protocol):
    """What the server needs of `shark_llm.engine.loop.Engine`; only `stop` may take its time."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def healthy(self) -> bool: ...

    @property
    def alive(self) -> bool: ...

    @property
    def failure(self) -> str | None: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def stats(self) -> EngineStats: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Everything that answers a request, once it is loaded."""

    name: str
    engine: EnginePort
    tokenizer: PromptTokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    vocab_size: int
    defaults: SamplingDefaults
    grammars: GrammarCompiler | None
    """None: the tokenizer is of a kind that structured output cannot be made with."""
    created: int = field(default_factory=lambda: int(time.time()))


class ServerState:
    """Changed only by the event loop's thread, but for `report`, which any thread may call.

    phase      GET /health    everything else that needs the model
    loading    503            503, Retry-After
    ready      200            answered
    draining   503            new calls 503, running ones finish
    dead       503            503
    """

    def __init__(self) -> None:
        self.phase: Phase = "loading"
        self.detail = "starting"
        self.percent: float | None = None
        self.stalled = False  # a step has been running for suspiciously long
        self.served: ServedModel | None = None
        self._active: dict[str, list[Generation]] = {}
        self._num_active = 0

    def report(self, detail: str, percent: float | None = None) -> None:
        """Say what the loader is doing; shown by /health."""
        self.detail, self.percent = detail, percent

    def become_ready(self, served: ServedModel) -> None:
        self.served = served
        self.phase, self.detail, self.percent = "ready", "ready", None

    def model(self, name: str | None = None) -> ServedModel:
        """The served model, if it can be used now and is the one that was asked for.

        Raises:
            RequestError: 503 while it cannot be used, 404 for another model's name.
        """
        if self.phase != "ready" or self.served is None:
            raise RequestError(self.unavailable(), code=self.phase, status=503)
        if name is not None and name != self.served.name:
            raise RequestError(
                f"the model {shorten(name)} does not exist here; "
                f"this server serves {self.served.name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return self.served

    def unavailable(self) -> str:
        """Why no request is taken, for a client."""
        if self.phase == "loading":
            progress = "" if self.percent is None else f", {self.percent:.0f} %"
            return f"the server is still starting ({self.detail}{progress}); try again soon"
        if self.phase == "draining":
            return "the server is shutting down and takes no new requests; try another replica"
        return f"the engine is dead ({self.detail}); the server must be restarted"

    @property
    def num_active(self) -> int:
        """Calls that have not been answered to the end."""
        return self._num_active

    @property
    def engine_is_busy(self) -> bool:
        """Whether the engine owes anything; answers that are only not read yet do not count."""
        return any(call.is_running for calls in self._active.values() for call in calls)

    def track(self, generation: Generation, names: Iterable[str]) -> None:
        """Remember a generation under every name that /abort may use for it."""
        self._num_active += 1
        for name in set(names):
            self._active.setdefault(name, []).append(generation)

    def forget(self, generation: Generation, names: Iterable[str]) -> None:
        self._num_active -= 1
        for name in set(names):
            remaining = [other for other in self._active[name] if other is not generation]
            if remaining:
                self._active[name] = remaining
            else:
                del self._active[name]

    def abort(self, name: str) -> int:
        """Abort every generation of that name; returns how many there were."""
        generations = self._active.get(name, [])
        for generation in generations:
            generation.abort()
        return len(generations)

    def abort_all(self) -> None:
        for generations in list(self._active.values()):
            for generation in generations:
                generation.abort()
