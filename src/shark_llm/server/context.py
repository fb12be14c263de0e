"""What every endpoint is given, and the one way in which a call to the engine begins."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from shark_llm.server.doorbell import Doorbells
from shark_llm.server.generation import Generation
from shark_llm.server.metrics import Metrics
from shark_llm.server.settings import ServerSettings
from shark_llm.server.state import ServedModel, ServerState
from shark_llm.server.text_stream import ChoiceSpec


@dataclass(frozen=True, kw_only=True)
class Context:
    """The parts that `create_app` joins. There is one per app, and nothing global beside it."""

    settings: ServerSettings
    state: ServerState
    metrics: Metrics
    doorbells: Doorbells = field(default_factory=Doorbells)

    def begin(
        self,
        request: Request,
        served: ServedModel,
        specs: Sequence[ChoiceSpec],
        *,
        prefix: str,
        names: Sequence[str] = (),
    ) -> Generation:
        """Submit a call's choices. Whoever calls this must see to it that `close` is called.

        The call can be aborted by its own id, by `names` (the client's, from the body) and by the
        X-Request-Id header.

        Raises:
            RequestError: the engine does not take it.
        """
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        header = request.headers.get("x-request-id")
        all_names = {request_id, *names} | ({header} if header else set())
        generation = Generation(
            request_id=request_id,
            specs=specs,
            engine=served.engine,
            tokenizer=served.tokenizer,
            metrics=self.metrics,
            doorbell=self.doorbells.here(),
            max_backlog_tokens=self.settings.max_backlog_tokens,
            request_timeout=self.settings.request_timeout,
            owner=getattr(request.state, "owner", ""),
            on_close=lambda closed: self.state.forget(closed, all_names),
        )
        self.state.track(generation, all_names)
        generation.submit()
        return generation
