"""The ASGI app: one table of endpoints, joined with the layers around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shark_llm.errors import RequestError
from shark_llm.server import status, status_page
from shark_llm.server.access import ApiKeys, ConcurrencyLimit, RequestLog
from shark_llm.server.chat import chat_completions
from shark_llm.server.completions import completions
from shark_llm.server.context import Context
from shark_llm.server.errors import error_response, request_error_response, shorten
from shark_llm.server.generate import generate
from shark_llm.server.generate_protocol import (
    GenerateOutput,
    GenerateRequest,
    GenerateResponse,
)
from shark_llm.server.generation import GenerationFailed
from shark_llm.server.metrics import Metrics
from shark_llm.server.openapi import Endpoint, openapi_document
from shark_llm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
)
from shark_llm.server.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    ModelCard,
    ModelList,
)
from shark_llm.server.settings import ServerSettings
from shark_llm.server.state import ServerState
from shark_llm.server.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    detokenize,
    tokenize,
)

ENDPOINTS: Sequence[Endpoint] = (
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=completions,
        summary="Continue one or several prompts.",
        request=CompletionRequest,
        response=CompletionResponse,
        chunk=CompletionResponse,
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        summary="Answer a conversation.",
        request=ChatCompletionRequest,
        response=ChatCompletionResponse,
        chunk=ChatCompletionChunk,
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        handler=status.models,
        summary="What is served.",
        response=ModelList,
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{name}",
        handler=status.model,
        summary="One model by name.",
        response=ModelCard,
        path_params=("name",),
    ),
    Endpoint(
        method="POST",
        path="/generate",
        handler=generate,
        summary="Continue prompts, in the form of sglang and shortfin.",
        request=GenerateRequest,
        response=GenerateResponse,
        chunk=GenerateOutput,
    ),
    Endpoint(
        method="POST",
        path="/abort",
        handler=status.abort,
        summary="End a running call.",
        request=status.AbortRequest,
        response=status.AbortResponse,
    ),
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="Text or messages to token ids.",
        request=TokenizeRequest,
        response=TokenizeResponse,
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        summary="Token ids to text.",
        request=DetokenizeRequest,
        response=DetokenizeResponse,
    ),
    Endpoint(
        method="GET",
        path="/health",
        handler=status.health,
        summary="Whether a token can be made now.",
        response=status.Health,
    ),
    Endpoint(
        method="GET",
        path="/status",
        handler=status_page.status,
        summary="What the server does now: the numbers of the page at /.",
        response=status_page.ServerStatus,
    ),
    Endpoint(
        method="GET",
        path="/",
        handler=status_page.page,
        summary="A page that shows /status and renews it.",
        media_type="text/html",
    ),
    Endpoint(
        method="GET",
        path="/version",
        handler=status.version,
        summary="The version of this server.",
        response=status.Version,
    ),
    Endpoint(method="GET", path="/metrics", handler=status.metrics, summary="Prometheus metrics."),
)


def create_app(
    settings: ServerSettings, state: ServerState, metrics: Metrics | None = None
) -> Starlette:
    """Build the app. It answers at once; what needs the model is 503 until `state` is ready."""
    context = Context(
        settings=settings,
        state=state,
        metrics=metrics or Metrics(settings.served_model_name),
    )
    routes = [
        # A model's name may hold slashes, as names on the hub do.
        Route(
            endpoint.path.replace("{name}", "{name:path}"),
            partial(endpoint.handler, context),
            methods=[endpoint.method],
        )
        for endpoint in ENDPOINTS
    ]
    document = json.dumps(openapi_document(ENDPOINTS))
    routes.append(Route("/openapi.json", partial(_openapi, document), methods=["GET"]))
    middleware = [Middleware(RequestLog, debug=settings.debug)]
    if settings.cors_allow_origins:
        # Outside the keys: a browser's preflight carries none.
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_allow_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id"],
            )
        )
    if settings.api_keys:
        middleware.append(Middleware(ApiKeys, keys=settings.api_keys))
    middleware.append(Middleware(ConcurrencyLimit, limit=settings.max_concurrent_requests))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            RequestError: _request_error,
            GenerationFailed: _generation_failed,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
        },
    )


async def _openapi(document: str, request: Request) -> Response:
    return Response(document, media_type="application/json")


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return request_error_response(error)


async def _generation_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, GenerationFailed)
    return error_response(str(error), status=error.status, code=error.code)


async def _client_gone(request: Request, error: Exception) -> Response:
    # Nobody reads this; 499 is what the access log shows for it, as nginx writes it.
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in our form."""
    assert isinstance(error, HTTPException)
    where = shorten(request.url.path)
    if error.status_code == 404:
        message, code = f"there is no route {where}; see GET /openapi.json", "route_not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{where} does not take {request.method}; it takes {allowed}"
        code = "method_not_allowed"
    else:
        message, code = str(error.detail), "invalid_request"
    return error_response(message, status=error.status_code, code=code, headers=error.headers)
