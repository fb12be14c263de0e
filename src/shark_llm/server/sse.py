"""Server-sent events, and what to do when the reader is gone.

uvicorn applies back-pressure: `send` waits while the client does not read. What piles up meanwhile
is bounded by the generation's own backlog limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"


def event(body: BaseModel) -> bytes:
    """One `data:` event. Line breaks inside JSON strings are escaped, so a body is one line."""
    return b"data: " + body.model_dump_json().encode() + b"\n\n"


class EventStream(Response):
    """Sends events until they end or the client leaves, then calls `on_close` in any case."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, on_close: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_close = on_close
        # Proxies that collect an answer before passing it on would undo the streaming.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnect:
            pass  # nobody is left to be told
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves first.

    Call it once the request's body has been read: from then on `receive` only reports the leaving.

    Raises:
        ClientDisconnect: the client left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        # Also when we are cancelled ourselves: neither task may outlive this call.
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
