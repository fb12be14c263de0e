"""What holds for every test: its marker is its folder's name, and it cannot reach the network."""

from __future__ import annotations

import gc
import ipaddress
import itertools
import os
import socket
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
SMOLLM2 = TESTS.parent / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_CACHE_NUMBERS = itertools.count()
KINDS = frozenset({"unit", "property", "golden", "iree", "e2e", "docs"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the folder it lies in; a test outside of them is a mistake."""
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind not in KINDS:
            folders = ", ".join(sorted(KINDS))
            raise pytest.UsageError(f"{item.path} lies in none of the test folders: {folders}")
        item.add_marker(kind)


def pytest_collection_finish() -> None:
    """Nothing that was imported is garbage later: searching it stops every thread of a test."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """The bindings complain of each object of theirs that is left when the interpreter ends."""
    gc.unfreeze()


def _is_loopback(address: Any) -> bool:
    """Whether a socket address is on this machine: a Unix socket, 127.0.0.0/8, ::1 or localhost."""
    if not isinstance(address, tuple):
        return True
    host = address[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True, scope="session")
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stage cache of fixtures that live longer than a test: never the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARK_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "session"))
        yield


@pytest.fixture(autouse=True)
def _own_cache(_session_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has an empty stage cache: what fakes have made is for nobody else."""
    own = f"{os.environ['SHARK_CACHE_DIR']}-{next(_CACHE_NUMBERS)}"
    monkeypatch.setenv("SHARK_CACHE_DIR", own)


@pytest.fixture(autouse=True, scope="session")
def _offline() -> Any:
    """Refuse connections that leave this machine, in the test process itself."""
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if not _is_loopback(address):
            raise OSError(f"tests are offline: a connection to {address!r} was refused")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_locally)
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model that tests use: SmolLM2-135M-Instruct as GGUF, fetched by scripts/test."""
    assert SMOLLM2.exists(), f"{SMOLLM2} is missing: run scripts/test once, or scripts/model.py"
    return SMOLLM2
