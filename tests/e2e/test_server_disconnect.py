"""Clients that close their socket, and clients that do not read, over real connections."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_harness import RealServer, real_server, wait_for
from shark_llm.engine.settings import EngineSettings

LONG = {"prompt": "p", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(
        {"q": "x" * 50},
        step_seconds=0.003,
        max_model_len=4096,
        num_pages=600,
        engine_settings=EngineSettings(max_num_seqs=2),
    ) as running:
        yield running


def send(server: RealServer, body: dict[str, Any]) -> socket.socket:
    """A raw POST of a completion; the caller closes the socket as it likes."""
    raw = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    connection.sendall(head.encode() + raw)
    return connection


def is_idle(server: RealServer) -> bool:
    stats = server.engine.stats()
    return stats.running == 0 and stats.waiting == 0 and stats.pages_held == 0


def test_a_stream_is_left_after_a_chunk(server: RealServer) -> None:
    """D15: the slot is free within a few steps, not after 3000 tokens."""
    connection = send(server, {**LONG, "stream": True})
    connection.recv(4096)
    connection.close()
    wait_for(lambda: is_idle(server), timeout=3)


def test_a_whole_answer_is_not_awaited(server: RealServer) -> None:
    """D15: the same without streaming."""
    connection = send(server, LONG)
    wait_for(lambda: server.engine.stats().running == 1)
    connection.close()
    wait_for(lambda: is_idle(server), timeout=3)


def test_leaving_while_queued(server: RealServer) -> None:
    """D15: a request that never ran leaves the queue; those before it go on."""
    running = [send(server, {**LONG, "stream": True}) for _ in range(2)]
    wait_for(lambda: server.engine.stats().running == 2)
    queued = send(server, LONG)
    wait_for(lambda: server.engine.stats().waiting == 1)
    queued.close()
    wait_for(lambda: server.engine.stats().waiting == 0)
    assert server.engine.stats().running == 2
    for connection in running:
        connection.close()
    wait_for(lambda: is_idle(server), timeout=3)


def test_a_stalled_reader_holds_nothing_up(server: RealServer) -> None:
    """A client that never reads neither blocks others nor keeps its pages for ever."""
    connection = send(server, {**LONG, "stream": True, "max_tokens": 500, "logprobs": 5})
    body = {"prompt": "q", "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).json()
    assert answer["choices"][0]["text"] == "x" * 50
    wait_for(lambda: is_idle(server), timeout=20)
    connection.close()


def test_malformed_requests_beside_a_good_stream(server: RealServer) -> None:
    """Fifty bad bodies do not disturb one stream."""
    bad: list[bytes] = [b"{", b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": [-1]}', b"[" * 999]
    body = {"prompt": "q", "temperature": 0, "stream": True}
    with httpx.Client(base_url=server.url, timeout=20) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            headers = {"content-type": "application/json"}
            for number in range(50):
                answer = client.post("/v1/completions", content=bad[number % 5], headers=headers)
                assert answer.status_code == 400
            rest = [json.loads(line[6:]) for line in lines if line and not line.endswith("[DONE]")]
        assert rest[-1]["choices"][0]["finish_reason"] == "stop"
    wait_for(lambda: is_idle(server), timeout=3)


@pytest.mark.parametrize("raw", [b"GARBAGE\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n"])
def test_garbage_instead_of_http(server: RealServer, raw: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(raw)
    assert httpx.get(f"{server.url}/health").status_code == 200
