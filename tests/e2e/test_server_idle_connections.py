"""Connections that keep the server waiting end; those that wait for the server do not."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import pytest

from serve_harness import RealServer, real_server
from shark_llm.server import lifecycle

PATIENCE = 1
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Hi", "max_tokens": 8}'


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_KEEP_ALIVE", PATIENCE)


def connect(server: RealServer) -> socket.socket:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), timeout=10 * PATIENCE)


def whole(body: bytes = BODY) -> bytes:
    return HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "beginning",
    [b"", b"POST /v1/comp", HEAD, whole()[:-5]],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_a_client_that_sends_no_request_is_let_go(beginning: bytes) -> None:
    """Thousands of them took all file descriptors, and nobody else was let in."""
    with real_server() as server, connect(server) as client:
        client.sendall(beginning)
        began = time.monotonic()
        assert client.recv(100) == b"", "the server closes it"
        assert time.monotonic() - began < 6 * PATIENCE


def test_a_head_that_trickles_in_is_let_go() -> None:
    with real_server() as server, connect(server) as client:
        began = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(client, 6 * PATIENCE)
        assert time.monotonic() - began < 6 * PATIENCE


def trickle(client: socket.socket, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        client.sendall(b"x")
        time.sleep(PATIENCE / 5)


def test_a_second_request_that_stops_in_its_head_is_let_go() -> None:
    with real_server({"Hi": " there"}) as server, connect(server) as client:
        client.sendall(whole())
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(HEAD)
        while client.recv(65536):
            pass


def test_a_slow_body_and_a_slow_answer_are_waited_for() -> None:
    """Parts that come in time may take longer together, and an answer as long as it takes."""
    slow = real_server({"Hi": " there"}, step_seconds=0.4 * PATIENCE)
    with slow as server, connect(server) as client:
        for part in (whole()[:-6], whole()[-6:-3], whole()[-3:]):
            client.sendall(part)
            time.sleep(0.6 * PATIENCE)
        began = time.monotonic()
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - began > PATIENCE / 2
