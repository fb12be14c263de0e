"""The rules of tests/conftest.py hold: markers by folder, no way out to the network."""

from __future__ import annotations

import socket

import pytest


def test_marker_is_the_folder(request: pytest.FixtureRequest) -> None:
    assert [mark.name for mark in request.node.iter_markers()] == ["unit"]


# 192.0.2.0/24 and 2001:db8::/32 are reserved for documentation (RFC 5737, RFC 3849).
@pytest.mark.parametrize(
    ("family", "host"),
    [
        (socket.AF_INET, "192.0.2.1"),
        (socket.AF_INET6, "2001:db8::1"),
        (socket.AF_INET, "hub.invalid"),
    ],
)
def test_connection_out_is_refused(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as sock, pytest.raises(OSError, match="tests are offline"):
        sock.connect((host, 80))


def test_connection_to_this_machine_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
