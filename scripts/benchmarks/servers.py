"""A server under test: started on given cores, watched, stopped."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from benchmarks import peers
from benchmarks.results import OURS, PEER
from benchmarks.worker import on_cpus

HOST = "127.0.0.1"
READY_TIMEOUT = 120.0
STOP_TIMEOUT = 30.0
POLL_SECONDS = 0.01
_TICK = os.sysconf("SC_CLK_TCK")


class ServerError(Exception):
    """A server did not start or did not live; the message names its log."""


class Server:
    """`side` is OURS or PEER. The server answers once the block is entered."""

    def __init__(
        self, side: str, command: Sequence[str], *, port: int, cpus: Sequence[int]
    ) -> None:
        self.side, self.port = side, port
        self.log = peers.CACHE / f"serve-{side}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.perf_counter()
        with self.log.open("w") as log, on_cpus(cpus):
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        after_name = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / _TICK

    def memory_mib(self) -> float:
        """Resident now, mapped parameters included."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        resident = re.search(r"^VmRSS:\s*(\d+)", status, re.MULTILINE)
        assert resident is not None, "a living process has memory"
        return int(resident[1]) / 1024

    def _wait_until_ready(self) -> None:
        while time.perf_counter() - self.started < READY_TIMEOUT:
            if self._process.poll() is not None:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
                raise ServerError(f"{tail}\n{self.side}'s server ended with exit code {self._code}")
            if healthy(self.port):
                self.ready_seconds = time.perf_counter() - self.started
                return
            time.sleep(POLL_SECONDS)
        shown = self.log.relative_to(peers.ROOT)
        raise ServerError(f"{self.side}'s server is not ready after {READY_TIMEOUT:.0f} s: {shown}")

    @property
    def _code(self) -> int | None:
        return self._process.returncode


def ours(
    bundle: Path,
    *,
    device: str,
    cpus: Sequence[int],
    kv_cache_tokens: int,
    max_num_seqs: int,
    flags: Sequence[str] = (),
) -> Server:
    """shark-serve with the defaults of its engine but for the sizes given, and `flags`."""
    port = free_port()
    program = str(Path(sys.executable).with_name("shark-serve"))
    command = [program, "--artifacts-dir", str(bundle), "--device", device]
    command += ["--port", str(port), "--max-num-seqs", str(max_num_seqs)]
    command += ["--kv-cache-tokens", str(kv_cache_tokens), "--log-level", "warning"]
    return Server(OURS, [*command, *flags], port=port, cpus=cpus)


def theirs(
    binary: Path,
    model: Path,
    *,
    cpus: Sequence[int],
    kv_cache_tokens: int,
    max_num_seqs: int,
    unified: bool,
) -> Server:
    """llama-server with one KV cache for all slots (`unified`) or one for each."""
    port, threads = free_port(), str(len(cpus))
    command = [str(binary), "--model", str(model), "--host", HOST, "--port", str(port)]
    command += ["--threads", threads, "--threads-batch", threads, "--no-webui"]
    command += ["--parallel", str(max_num_seqs), "--ctx-size", str(kv_cache_tokens)]
    command += ["--kv-unified" if unified else "--no-kv-unified"]
    return Server(PEER, command, port=port, cpus=cpus)


def metrics(port: int) -> dict[str, float]:
    """GET /metrics of one of our servers; see `parse_metrics`."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/metrics")
        return parse_metrics(connection.getresponse().read().decode())
    finally:
        connection.close()


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text form: values by name, those of several labels added up."""
    values: dict[str, float] = {}
    for name, value in re.findall(r"^(\w+)(?:{[^}]*})? (\S+)$", text, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def healthy(port: int) -> bool:
    """Whether GET /health answers 200 now."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False  # not listening yet
    finally:
        connection.close()
