"""Reads a request's JSON body: size limit, content type, strict parsing."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from shark_llm.errors import RequestError
from shark_llm.server.errors import from_validation_error, shorten

Model = TypeVar("Model", bound=BaseModel)

_INLINE_BYTES = 65_536  # larger bodies are parsed on a thread: 16 MB take seconds


async def read_body(request: Request, model: type[Model], *, max_bytes: int) -> Model:
    """Parse the body as `model`.

    Raises:
        RequestError: 413 too large, 415 not sent as JSON, 400 not JSON or not what `model` wants.
        ClientDisconnect: the client left before the body was whole.
    """
    check_content_type(request.headers.get("content-type"))
    raw = await _read_limited(request, max_bytes)
    try:
        # pydantic's own JSON reader refuses what json.loads lets through and what breaks later:
        # lone surrogates, invalid UTF-8, a byte order mark, NaN.
        if len(raw) > _INLINE_BYTES:
            return await asyncio.to_thread(model.model_validate_json, raw)
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation_error(error) from None


def check_content_type(content_type: str | None) -> None:
    """A form or text/plain is refused: browsers send those across origins without asking first."""
    if content_type is None:
        return
    media_type = content_type.split(";")[0].strip().lower()
    if media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        return
    raise RequestError(
        f"Content-Type is {shorten(media_type)}, expected application/json; "
        "send the header 'Content-Type: application/json'",
        code="unsupported_media_type",
        status=415,
    )


async def _read_limited(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes} bytes; send a shorter prompt or fewer prompts",
        code="request_too_large",
        status=413,
    )
