"""shark-serve as a process: ready line, signals, exit codes, ports. The runner is the fake one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_harness import byte_tokenizer, events_of, wait_for

TESTS = Path(__file__).parent.parent

# Everything of the command is real but the device: the runner that it loads is the fake one, which
# is told by the environment how slow it is and when it breaks.
PROGRAM = """
import os, sys, time, types

import shark_llm.artifacts.bundle as bundle
from fake_runner import FakeRunner
from serve_harness import VOCAB_SIZE

slow = float(os.environ.get("SLOW_STEP", "0.002"))
broken_at = int(os.environ.get("BROKEN_AT", "1000000"))

def on_forward(index, phase, rows):
    if index >= broken_at:
        raise RuntimeError("hip error 719")

def load_runner(opened, device, kv_cache_tokens, max_model_len):
    time.sleep(float(os.environ.get("SLOW_LOAD", "0")))
    print("loaded", device.driver, device.device_ids, kv_cache_tokens, max_model_len, flush=True)
    return FakeRunner(
        vocab_size=VOCAB_SIZE, max_model_len=4096, num_pages=600, step_seconds=slow,
        next_token=lambda history: 91, on_forward=on_forward,
    )

def module(name, **parts):
    made = types.ModuleType(name)
    made.__dict__.update(parts)
    sys.modules[name] = made

module("shark_llm.runtime.module", load_runner=load_runner)

def open_bundle(directory, **options):
    source = types.SimpleNamespace(name="org/fake", revision=None)
    target = types.SimpleNamespace(driver="local-task")
    manifest = types.SimpleNamespace(
        source=source, target=target, eos_token_ids=(1,), weights=os.environ.get("WEIGHTS")
    )
    return types.SimpleNamespace(path=directory, manifest=manifest)

bundle.open_bundle = open_bundle

from shark_llm.cli.serve import main
main()
"""


class Process:
    """A running shark-serve; `url` is known once it is ready."""

    def __init__(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        self.process = process
        self.lines = lines

    @property
    def url(self) -> str:
        found = re.search(r"http://\S+", self.lines[-1])
        assert found is not None, self.lines
        return found.group()

    def wait(self) -> int:
        return self.process.wait(timeout=20)


@contextmanager
def serve(
    tmp_path: Path, *flags: str, ready: bool = True, env: dict[str, str] | None = None
) -> Iterator[Process]:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--artifacts-dir", str(tmp_path), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS), **(env or {})},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[str] = []
    try:
        if ready:
            for line in process.stdout:
                lines.append(line.strip())
                if line.startswith("shark-serve: ready"):
                    break
        yield Process(process, lines)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def stream(url: str, tokens: int) -> Any:
    body = {"prompt": "p", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20)


def test_ready_line_port_0_and_flags(tmp_path: Path) -> None:
    """F03: the real port is printed; flags in both spellings reach the runner."""
    flags = ["--port=0", "--device_ids", "0", "1", "--kv_cache_tokens", "512", "--device", "hip"]
    with serve(tmp_path, *flags) as server:
        assert server.lines[0] == "loaded hip (0, 1) 512 None"
        assert re.fullmatch(
            r"shark-serve: ready at http://127\.0\.0\.1:\d+  model=org/fake max_model_len=4096 "
            r"kv_tokens=9584 prefill_bs=1,4 decode_bs=1,4,8",
            server.lines[-1],
        )
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "org/fake"
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.process.stderr is not None
        assert "leaked" not in server.process.stderr.read()  # as nanobind says of what is left


def test_sigterm_lets_streams_finish(tmp_path: Path) -> None:
    """F01: a stream of 200 tokens, SIGTERM at 20, a new request meanwhile."""
    with serve(tmp_path, "--port", "0", env={"SLOW_STEP": "0.005"}) as server:
        with stream(server.url, 200) as response:
            lines = response.iter_lines()
            text = [next(lines) for _ in range(40)]
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
            new = httpx.post(f"{server.url}/v1/completions", json={"prompt": "p"})
            assert new.status_code == 503
            text += list(lines)
        events = events_of("\n".join(text))
        assert sum(len(choice["text"]) for e in events for choice in e["choices"]) == 200
        assert server.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_now(tmp_path: Path, number: signal.Signals) -> None:
    """F01."""
    with (
        serve(tmp_path, "--port", "0", env={"SLOW_STEP": "0.05"}) as server,
        stream(server.url, 3000) as response,
    ):
        lines = response.iter_lines()  # kept: dropping it would close the connection
        next(lines)
        server.process.send_signal(number)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(number)
        started = time.monotonic()
        assert server.wait() == 128 + number
        assert time.monotonic() - started < 2


def test_a_signal_while_loading_ends_now(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", ready=False, env={"SLOW_LOAD": "30"}) as server:
        assert server.process.stderr is not None
        line = server.process.stderr.readline()
        assert "listening on http://127.0.0.1:" in line
        url = re.search(r"http://[\d.:]+", line)
        assert url is not None
        assert httpx.get(f"{url.group()}/health").json()["status"] == "loading"
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_the_death_of_the_engine_is_exit_code_1(tmp_path: Path) -> None:
    """F02."""
    with serve(tmp_path, "--port", "0", env={"BROKEN_AT": "5"}) as server:
        for _ in range(4):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "p", "max_tokens": 9})
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.wait() == 1
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


def test_a_model_that_cannot_make_a_token_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", ready=False, env={"BROKEN_AT": "0"}) as server:
        assert server.wait() == 1
        assert server.process.stderr is not None
        last = server.process.stderr.read().strip().splitlines()[-1]
        assert last.startswith("shark-serve: error: the model cannot make a token")


def test_dummy_weights_are_refused_unless_allowed(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", ready=False, env={"WEIGHTS": "dummy"}) as server:
        assert server.wait() == 1
        assert server.process.stderr is not None
        (line,) = server.process.stderr.read().splitlines()
        assert "--allow-dummy-weights" in line
    flags = ["--port", "0", "--allow-dummy-weights"]
    with serve(tmp_path, *flags, env={"WEIGHTS": "dummy"}) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_port_in_use_is_refused_before_loading(tmp_path: Path) -> None:
    """F03: in less than two seconds of the command's own time, and nothing is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serve(tmp_path, "--port", str(port), ready=False, env={"SLOW_LOAD": "30"}) as server:
            assert server.wait() == 2
            assert server.process.stderr is not None
            (line,) = server.process.stderr.read().splitlines()
            assert line.startswith(f"shark-serve: error: cannot listen on 127.0.0.1 port {port}")
