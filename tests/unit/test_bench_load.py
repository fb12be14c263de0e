"""The load's client: events cut from bytes, and a stream against a server of a few lines."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_samples import load

EVENTS = [
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": "äb"}]},
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]
STREAM = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in EVENTS)
STREAM = b": a comment\r\n\r\n" + STREAM + b"data: [DONE]\n\n"
LOAD = load.Load(concurrency=2, requests=3, prompt_tokens=8, max_tokens=3, vocab_size=1000, seed=7)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_however_the_bytes_come(cuts: list[int]) -> None:
    reader = load.EventReader()
    bounds = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(bounds)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_only_new_text_counts_as_a_token_event() -> None:
    assert [load.carries_token(event) for event in EVENTS] == [True, True, False, False]


def test_times_of_an_answer() -> None:
    answer = load.Answer(output_tokens=5, sent=1.0, events=(1.5, 1.75, 2.5))
    assert answer.ttft == 0.5
    assert answer.tpot == 0.25
    assert answer.gaps == [0.25, 0.75]


def test_prompts_are_distinct_and_repeatable() -> None:
    prompts = list(load.prompts(LOAD))
    assert prompts == list(load.prompts(LOAD))
    assert len({tuple(prompt) for prompt in prompts}) == LOAD.requests
    assert all(len(prompt) == 8 for prompt in prompts)
    assert all(100 <= token < 1000 for prompt in prompts for token in prompt)


@contextmanager
def answering(reply: bytes) -> Iterator[tuple[int, list[dict[str, object]]]]:
    """A server that reads a request and sends `reply`: its port, and the bodies that came."""
    bodies: list[dict[str, object]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(reply)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1], bodies
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(server.wait_closed())
        loop.close()


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"Connection: close\r\n\r\n" + STREAM,
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(STREAM, 7),
    ],
    ids=["until the end", "chunked"],
)
def test_a_load_is_answered(reply: bytes) -> None:
    with answering(reply) as (port, bodies):
        answers, seconds = load.run("127.0.0.1", port, LOAD)
    assert [answer.output_tokens for answer in answers] == [3, 3, 3]
    assert all(len(answer.events) == 2 for answer in answers)
    assert seconds > 0
    assert sorted(body["prompt"] for body in bodies) == sorted(load.prompts(LOAD))
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] for body in bodies)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy", "503 Service Unavailable: busy"),
        (OK + b'\r\ndata: {"error": {"message": "device lost"}}\n\n', "device lost"),
        (OK + b"\r\ndata: [DONE]\n\n", "without a token"),
    ],
    ids=["refused", "broken off", "empty"],
)
def test_a_failed_request_ends_the_load(reply: bytes, message: str) -> None:
    with answering(reply) as (port, _), pytest.raises(load.LoadError, match=message):
        load.run("127.0.0.1", port, LOAD)
