"""A closed-loop load on an OpenAI-style server: so many streams, each one request after another.

Standard library only and no JSON of our own to decode per token but the events', since the client
takes CPU time from the server it measures. Prompts are distinct random token ids: no prefix cache
can help, and no tokenizer is needed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

FIRST_ORDINARY_TOKEN = 100
REQUEST_TIMEOUT = 600.0


class LoadError(Exception):
    """The server refused a request or broke it off; the message is the server's."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the server. `requests` of all streams together."""

    concurrency: int
    requests: int
    prompt_tokens: int
    max_tokens: int
    vocab_size: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One streamed completion. Times are seconds on one clock."""

    output_tokens: int
    sent: float
    events: tuple[float, ...]
    """When each event with a new token came."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; one alone has none."""
        return (self.events[-1] - self.events[0]) / max(1, self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]


def run(host: str, port: int, load: Load) -> tuple[list[Answer], float]:
    """All answers, and the seconds from the first request to the last token. Raises LoadError."""
    return asyncio.run(_run(host, port, load))


def prompts(load: Load) -> Iterator[list[int]]:
    """The prompts of a load, the same for the same seed."""
    source = random.Random(load.seed)
    for _ in range(load.requests):
        yield source.choices(range(FIRST_ORDINARY_TOKEN, load.vocab_size), k=load.prompt_tokens)


async def _run(host: str, port: int, load: Load) -> tuple[list[Answer], float]:
    waiting = [completion_body(prompt, load.max_tokens) for prompt in prompts(load)]
    answers: list[Answer] = []

    async def stream() -> None:
        while waiting:
            body = waiting.pop()
            async with asyncio.timeout(REQUEST_TIMEOUT):
                answers.append(await complete(host, port, body))

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(stream())
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise LoadError(f"a request failed: {type(first).__name__}: {first}") from first
    return answers, time.perf_counter() - started


def completion_body(prompt: list[int], max_tokens: int) -> bytes:
    """The JSON of a greedy, streamed completion of exactly `max_tokens` tokens."""
    return json.dumps(
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def complete(host: str, port: int, body: bytes, times: list[float] | None = None) -> Answer:
    """One completion. `times` gets the time of each event with a new token as it comes.

    Raises LoadError when the server refuses it or breaks it off.
    """
    times = [] if times is None else times
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        sent = time.perf_counter()
        writer.write(head.encode() + body)
        status = await reader.readline()
        chunked = False
        while (line := await reader.readline()) not in (b"\r\n", b""):
            chunked |= line.lower().replace(b" ", b"").startswith(b"transfer-encoding:chunked")
        if status.split()[1:2] != [b"200"]:
            text = (await reader.read()).decode(errors="replace")
            raise LoadError(f"HTTP {status.decode().strip()}: {text[:300]}")
        events = EventReader()
        tokens: int | None = None
        while data := await _next_piece(reader, chunked):
            now = time.perf_counter()
            for event in events.feed(data):
                if "error" in event:
                    raise LoadError(str(event["error"]))
                if usage := event.get("usage"):
                    tokens = int(usage["completion_tokens"])
                if carries_token(event):
                    times.append(now)
    finally:
        writer.close()
    if tokens is None or not times:
        raise LoadError("the stream ended without a token or without its usage")
    return Answer(output_tokens=tokens, sent=sent, events=tuple(times))


async def _next_piece(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    """The next bytes of the body; empty at its end."""
    if not chunked:
        return await reader.read(65536)
    size = int((await reader.readline()).split(b";")[0] or b"0", 16)
    if size == 0:
        return b""
    data = await reader.readexactly(size)
    await reader.readexactly(2)
    return data


def carries_token(event: dict[str, Any]) -> bool:
    """Whether an event brings new text: the last ones bring only the end and the usage."""
    choices = event.get("choices")
    return isinstance(choices, list) and any(choice.get("text") for choice in choices)


class EventReader:
    """Server-sent events whose data is JSON, cut from a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The events completed by `data`; the closing [DONE] is none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from _events(lines)


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        name, _, value = line.partition(b":")
        if name == b"data" and value.strip() not in (b"", b"[DONE]"):
            yield json.loads(value)
