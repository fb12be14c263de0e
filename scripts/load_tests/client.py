"""One request over a connection of its own, and all that came back. Standard library only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 120.0
DONE = "[DONE]"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens."""

    host: str
    port: int


@dataclass(kw_only=True)
class Reply:
    """What a client has seen of its answer."""

    status: int = 0
    body: dict[str, Any] | None = None
    """The JSON of an answer that is no stream."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The events of a stream, without its [DONE]."""
    done: bool = False
    """[DONE] came, as the last event."""
    after_done: bool = False
    left: bool = False
    """The client closed the connection before the end."""

    @property
    def parts(self) -> list[dict[str, Any]]:
        """All JSON of the answer, in order."""
        return self.events if self.body is None else [self.body]

    @property
    def text(self) -> str:
        return "".join(choice.get("text") or "" for choice in self._choices())

    @property
    def finish_reasons(self) -> list[str]:
        return [c["finish_reason"] for c in self._choices() if c.get("finish_reason")]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [part["error"] for part in self.parts if "error" in part]

    @property
    def completion_tokens(self) -> int | None:
        usages = [part["usage"] for part in self.parts if part.get("usage")]
        return usages[-1]["completion_tokens"] if usages else None

    def _choices(self) -> Iterator[dict[str, Any]]:
        for part in self.parts:
            yield from part.get("choices", ())


async def post(
    address: Address,
    path: str,
    body: bytes,
    *,
    leave_after: int | None = None,
    leave_seconds: float | None = None,
) -> Reply:
    """POST `body`; leave after so many events, or so many seconds, if the answer takes longer."""
    reply = Reply()
    try:
        async with asyncio.timeout(TIMEOUT if leave_seconds is None else leave_seconds):
            await _exchange(address, path, body, reply, leave_after)
    except TimeoutError:
        if leave_seconds is None:
            raise
        reply.left = True
    return reply


async def _exchange(
    address: Address, path: str, body: bytes, reply: Reply, leave_after: int | None
) -> None:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        reply.status = int((await reader.readline()).split()[1])
        headers = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        if headers.get("content-type", "").startswith("text/event-stream"):
            await _read_stream(reader, reply, leave_after)
        elif "content-length" in headers:
            reply.body = json.loads(await reader.readexactly(int(headers["content-length"])))
    finally:
        writer.close()


async def _read_stream(reader: asyncio.StreamReader, reply: Reply, leave_after: int | None) -> None:
    rest = b""
    while data := await _chunk(reader):
        *blocks, rest = (rest + data).split(b"\n\n")
        for block in blocks:
            if leave_after is not None and len(reply.events) >= leave_after:
                reply.left = True
                return
            text = block.decode().removeprefix("data: ")
            reply.after_done |= reply.done
            if text == DONE:
                reply.done = True
            else:
                reply.events.append(json.loads(text))


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk of a body in chunked coding; empty at its end."""
    size = int((await reader.readline()).split(b";")[0] or b"0", 16)
    data = await reader.readexactly(size)
    await reader.readline()
    return data


async def get(address: Address, path: str) -> tuple[int, str]:
    """Status and body."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(TIMEOUT):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return int(head.split()[1]), body.decode()


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once. The first that fails ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
