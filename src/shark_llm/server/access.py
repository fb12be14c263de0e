"""The ASGI layers around the app: request ids and the access log, API keys, the last resort.

RequestLog -> CORS (if asked for) -> ApiKeys (if any) -> ConcurrencyLimit -> routes
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
OPEN_PATHS = frozenset({"/health", "/"})
"""Without a key: the page at / shows nothing before it has been given one."""
UNLIMITED_PATHS = frozenset({"/health", "/metrics"})
"""Whoever watches a server must see it when it is full."""


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
    """Lets in who sends `Authorization: Bearer KEY` with one of the keys; `OPEN_PATHS` are open.

    `scope["state"]["owner"]` says which key it was, by its number: keys themselves go nowhere.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        number = self._number_of_key(scope)
        if number is not None:
            scope.setdefault("state", {})["owner"] = f"key {number}"
            await self._app(scope, receive, send)
            return
        response = error_response(
            "no valid API key; send the header 'Authorization: Bearer YOUR_KEY'",
            status=HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
        )
        await response(scope, receive, send)

    def _number_of_key(self, scope: Scope) -> int | None:
        scheme, _, credentials = _authorization(scope["headers"]).partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        # Every key is compared, each in constant time: the time taken tells nothing.
        matches = [hmac.compare_digest(credentials.strip(), key) for key in self._keys]
        return matches.index(True) if any(matches) else None


class ConcurrencyLimit:
    """Answers 503 to a call beyond the `limit` that are open, before its body is read.

    The engine's queue bounds what waits for the device; this bounds what is still being read,
    tokenized or sent. The connection is closed with the answer.
    """

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNLIMITED_PATHS:
            await self._app(scope, receive, send)
            return
        if self._num_open >= self._limit:
            response = error_response(
                f"{self._num_open} requests are open, and this server takes {self._limit} at once "
                "(--max-concurrent-requests); try again later",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="too_many_requests",
                headers={"Connection": "close"},
            )
            await response(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1


def _authorization(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return next((value for name, value in headers if name == b"authorization"), b"")
