"""GET /health, /version, /metrics, /v1/models, and POST /abort."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from shark_llm import __version__
from shark_llm.server.body import read_body
from shark_llm.server.context import Context
from shark_llm.server.errors import RETRY_AFTER_SECONDS
from shark_llm.server.params import Strict
from shark_llm.server.responses import (
    ModelCard,
    ModelList,
)
from shark_llm.server.state import ServedModel, ServerState

Status = Literal["ok", "loading", "draining", "dead", "stalled"]


class Health(BaseModel):
    """`status` is `ok` only when a token can be made; `phase` says what is going on otherwise."""

    status: Status
    phase: str
    percent: float | None = None


class Version(BaseModel):
    version: str


class AbortRequest(Strict):
    """Names a request by the id of its answer, its X-Request-Id, or the id its client gave it."""

    request_id: str | None = Field(default=None, min_length=1)
    rid: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_name(self) -> AbortRequest:
        if (self.request_id is None) == (self.rid is None):
            raise ValueError("request_id: send either request_id or rid")
        return self


class AbortResponse(BaseModel):
    """How many running calls had that name. 0: it has ended already, or never was."""

    aborted: int


async def health(context: Context, request: Request) -> Response:
    """Whether a token can be made now: 200 or 503."""
    state = context.state
    status = status_of(state)
    body = Health(status=status, phase=state.detail, percent=state.percent)
    return Response(
        body.model_dump_json(exclude_none=True),
        status_code=200 if status == "ok" else 503,
        headers={} if status == "ok" else {"Retry-After": str(RETRY_AFTER_SECONDS)},
        media_type="application/json",
    )


async def version(context: Context, request: Request) -> Response:
    """The version of this package."""
    return Response(Version(version=__version__).model_dump_json(), media_type="application/json")


async def metrics(context: Context, request: Request) -> Response:
    """Prometheus metrics."""
    media_type = "text/plain; version=0.0.4; charset=utf-8"
    return Response(context.metrics.render(), media_type=media_type)


async def models(context: Context, request: Request) -> Response:
    """The one model that is served."""
    body = ModelList(data=[_card(context.state.model())])
    return Response(body.model_dump_json(), media_type="application/json")


async def model(context: Context, request: Request) -> Response:
    """One model by name."""
    served = context.state.model(request.path_params["name"])
    return Response(_card(served).model_dump_json(), media_type="application/json")


async def abort(context: Context, request: Request) -> Response:
    """End a running call; its answer finishes with reason `abort`."""
    body = await read_body(request, AbortRequest, max_bytes=context.settings.max_body_bytes)
    aborted = context.state.abort(body.request_id or body.rid or "")
    return Response(AbortResponse(aborted=aborted).model_dump_json(), media_type="application/json")


def status_of(state: ServerState) -> Status:
    """What /health says."""
    if state.phase != "ready":
        return state.phase
    # Asked now, not remembered: between its death and the watcher's next look nobody is told "ok".
    if state.served is None or not (state.served.engine.healthy and state.served.engine.alive):
        return "dead"
    return "stalled" if state.stalled else "ok"


def _card(served: ServedModel) -> ModelCard:
    return ModelCard(id=served.name, created=served.created, max_model_len=served.max_model_len)
