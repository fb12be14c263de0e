"""The OpenAPI 3.1 document, made from the same models that read and write the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from shark_llm import __version__
from shark_llm.server.context import Context
from shark_llm.server.errors import ErrorResponse

_REF = "#/components/schemas/{model}"
_ERRORS = {
    "400": "The request is invalid; the message names the field, the value and the limit.",
    "401": "No valid API key.",
    "404": "No such model.",
    "413": "The body is too large.",
    "415": "The body was not sent as application/json.",
    "500": "The engine failed on this request.",
    "503": "The server is loading, full, shutting down or dead; see Retry-After.",
    "504": "The request took longer than the server allows.",
}
_GET_ERRORS = ("401", "404", "503")


class Handler(Protocol):
    async def __call__(self, context: Context, request: Request, /) -> Response: ...


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One route: a row of the table that both the router and this document are made from."""

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None  # None: text of `media_type`
    media_type: str = "text/plain"
    chunk: type[BaseModel] | None = None  # of a stream's events, if it can stream
    path_params: tuple[str, ...] = ()


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole document as JSON-ready data."""
    models: list[tuple[type[BaseModel], Any]] = [(ErrorResponse, "serialization")]
    for endpoint in endpoints:
        if endpoint.request is not None:
            models.append((endpoint.request, "validation"))
        if endpoint.response is not None:
            models.append((endpoint.response, "serialization"))
        if endpoint.chunk is not None:
            models.append((endpoint.chunk, "serialization"))
    refs, definitions = models_json_schema(models, ref_template=_REF)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, refs)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "shark-serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _operation(endpoint: Endpoint, refs: Any) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media_type: {"schema": {"type": "string"}}}
    if endpoint.response is not None:
        schema = refs[(endpoint.response, "serialization")]
        content = {"application/json": {"schema": schema}}
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,  # type: ignore[attr-defined]
        "summary": endpoint.summary,
        "responses": {"200": {"description": "OK", "content": content}},
    }
    if endpoint.chunk is not None:
        # OpenAPI 3.1 has no word for the schema of an event.
        content["text/event-stream"] = {}
        chunk, error = (refs[(m, "serialization")]["$ref"] for m in (endpoint.chunk, ErrorResponse))
        operation["description"] = (
            "With `stream: true` the answer is server-sent events. The data of each is a "
            f"`{chunk}`, an `{error}` that ends the stream, or `[DONE]` at its end."
        )
    if endpoint.path == "/health":
        operation["responses"]["503"] = {"description": "Not ready", "content": content}
        return operation
    if endpoint.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[(endpoint.request, "validation")]}},
        }
    if endpoint.path_params:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in endpoint.path_params
        ]
    errors = {"application/json": {"schema": refs[(ErrorResponse, "serialization")]}}
    for status in _ERRORS if endpoint.request is not None else _GET_ERRORS:
        operation["responses"][status] = {"description": _ERRORS[status], "content": errors}
    return operation
