"""The ASGI layers around the app: request ids and the access log, API keys, the last resort.

RequestLog -> CORS (if asked for) -> ApiKeys (if any) -> routes
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shark_llm.server.errors import error_response

logger = logging.getLogger("shark_llm.server")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = frozenset({"/health"})


class RequestLog:
    """Gives every answer an X-Request-Id (the client's, if it is sane) and one line in the log.

    It is also where faults of our own end: the client gets a plain 500, the log the reason.
    """

    def __init__(self, app: ASGIApp, *, debug: bool) -> None:
        self._app = app
        self._debug = debug

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.error(
                "request %s failed: %s: %s",
                request_id,
                type(error).__name__,
                error,
                exc_info=self._debug,
            )
            if status:
                return  # the answer has begun: uvicorn cuts a connection that is left unfinished
            response = error_response(
                "the server failed on this request; its log has the reason under the "
                f"request id {request_id}",
                status=HTTPStatus.INTERNAL_SERVER_ERROR,
                code="internal_error",
            )
            await response(scope, receive, send_with_id)
        finally:
            logger.info(
                '%s "%s %s" %s %.3fs',
                request_id,
                scope["method"],
                scope["path"].encode("unicode_escape").decode("ascii"),
                status or "gone",
                time.monotonic() - started,
            )


class ApiKeys:
    """Lets in who sends `Authorization: Bearer KEY` with one of the keys; /health is open."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            await self._app(scope, receive, send)
            return
        response = error_response(
            "no valid API key; send the header 'Authorization: Bearer YOUR_KEY'",
            status=HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
        )
        await response(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, credentials = _authorization(scope["headers"]).partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Every key is compared, each in constant time: the time taken tells nothing.
        matches = [hmac.compare_digest(credentials.strip(), key) for key in self._keys]
        return any(matches)


def _authorization(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return next((value for name, value in headers if name == b"authorization"), b"")
