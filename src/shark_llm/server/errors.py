"""Every error leaves the server as {"error": {"message", "type", "param", "code"}}, like OpenAI's.

Messages name the field, the value (cut short) and the limit, and never a traceback or a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from shark_llm.errors import RequestError

MAX_SUB_ERRORS = 3
MAX_INPUT_CHARS = 64
RETRY_AFTER_SECONDS = 1


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer with a status of 400 or more."""

    error: ErrorBody


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> ErrorResponse:
    """The JSON object for an error of this HTTP status."""
    kind = "invalid_request_error"
    if status == HTTPStatus.UNAUTHORIZED:
        kind = "authentication_error"
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        kind = "server_error"
    return ErrorResponse(error=ErrorBody(message=message, type=kind, param=param, code=code))


def error_response(
    message: str,
    *,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A finished HTTP answer; a 503 tells the client when to come back."""
    all_headers = dict(headers or {})
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        all_headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    if status == HTTPStatus.UNAUTHORIZED:
        all_headers.setdefault("WWW-Authenticate", "Bearer")
    body = error_body(message, status=status, param=param, code=code)
    return Response(
        body.model_dump_json(),
        status_code=status,
        headers=all_headers,
        media_type="application/json",
    )


def request_error_response(error: RequestError) -> Response:
    return error_response(str(error), status=error.status, param=error.param, code=error.code)


def shorten(value: object, limit: int = MAX_INPUT_CHARS) -> str:
    """A value of the client's, short enough for a message."""
    # Long containers are cut before repr: a 10 MB list must not be printed to be thrown away.
    if isinstance(value, str):
        value = value[: limit + 1]
    elif isinstance(value, Sequence) and len(value) > limit:
        value = list(value[:limit])
    elif isinstance(value, Mapping) and len(value) > limit:
        return f"an object of {len(value)} keys"
    elif isinstance(value, int) and value.bit_length() > 256:
        return "a huge integer"
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def location(parts: Sequence[str | int]) -> str:
    """("messages", 0, "content") -> messages[0].content"""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def from_validation_error(error: ValidationError) -> RequestError:
    """The first few faults that pydantic found, as one 400."""
    details = error.errors(include_url=False)
    lines = [_describe(dict(detail)) for detail in details[:MAX_SUB_ERRORS]]
    if len(details) > MAX_SUB_ERRORS:
        lines.append(f"and {len(details) - MAX_SUB_ERRORS} more")
    param = location(details[0]["loc"]) or None
    if param is None:  # a rule over several fields: our message begins with the field's name
        named = re.match(r"(?:Value error, )?(\w+): ", details[0]["msg"])
        param = named.group(1) if named else None
    return RequestError("; ".join(lines), param=param, code="invalid_value")


def _describe(detail: Mapping[str, Any]) -> str:
    where = location(detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "json_invalid":
        return f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}"
    if detail["type"] == "missing":
        return f"{where}: this field is required"
    if detail["type"] == "value_error":  # our own validators name the value themselves
        return f"{where}: {message}" if where else message
    found = shorten(detail["input"])
    return f"{where}: {message[0].lower()}{message[1:]}, got {found}" if where else message
