"""shark-serve --model-path: from a checkpoint to an answer in one command, and again in seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import tiny

BIN = Path(sys.executable).parent
BODY = {"prompt": "the cat sat on the", "max_tokens": 8, "temperature": 0}


class Server:
    """A shark-serve process, from its first second."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log
        self.phases: list[str] = []

    @property
    def log(self) -> str:
        return self._log.read_text()

    def url(self) -> str:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"listening on (http://\S+),", self.log)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return found[1]

    def wait_ready(self) -> str:
        """Poll /health until it says 200, and note what it says until then."""
        url, deadline = self.url(), time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            answer = httpx.get(f"{url}/health", timeout=30)
            if answer.status_code == 200:
                return url
            assert answer.status_code == 503
            self.phases.append(answer.json()["phase"])
            time.sleep(0.02)
        raise AssertionError(self.log)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def serve(root: Path, *argv: object, **env: str) -> Iterator[Server]:
    log = root / "serve.log"
    command = [str(BIN / "shark-serve"), *map(str, argv), "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | env
        )
    server = Server(process, log)
    try:
        yield server
        assert "Traceback" not in server.log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.tiny_config(num_hidden_layers=1)
    return tiny.write_tiny(tmp_path_factory.mktemp("model") / "tiny", config=config)


def flags(model: Path, cache: Path) -> list[object]:
    """As users of the older stack write them."""
    small = ["--batch_sizes_prefill", "1", "--batch_sizes_decode", "1", "--device_ids", "0"]
    return ["--model-path", model, "--cache_dir", cache, "--device=local-task", *small]


def test_from_a_checkpoint_to_an_answer_and_again(model: Path, tmp_path: Path) -> None:
    """Phases are told from the first second; the second start only looks and needs no network."""
    cache = tmp_path / "cache"
    with serve(tmp_path, *flags(model, cache)) as server:
        url = server.wait_ready()
        assert any(phase.startswith("building the bundle: compile") for phase in server.phases)
        assert not any(str(tmp_path) in phase for phase in server.phases)
        first = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
        assert first["model"] == "tiny"
        assert server.stop() == 0
    (bundle,) = (cache / "bundles" / "tiny").iterdir()
    assert (bundle / "manifest.json").is_file()
    started = time.monotonic()
    with serve(tmp_path, *flags(model, cache), "--verify-digests", HF_HUB_OFFLINE="1") as server:
        url = server.wait_ready()
        assert time.monotonic() - started < 60
        again = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).json()
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert server.stop() == 0
        assert "is what was asked for already: nothing to do" in server.log
        assert "build: export" not in server.log


def test_a_build_that_fails_is_the_servers_error(tmp_path: Path) -> None:
    """One line, with the exit code of its kind; nothing is left in the cache."""
    config = tiny.tiny_config(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    other = tiny.write_tiny(tmp_path / "qwen", config=config)
    with serve(tmp_path, *flags(other, tmp_path / "cache")) as server:
        assert server.process.wait(120) == 1
        last = server.log.splitlines()[-1]
        assert last.startswith("shark-serve: error: config.json: architectures = ['Qwen2ForCausal")
    assert not list((tmp_path / "cache").rglob("manifest.json"))


def test_stopped_while_it_builds(model: Path, tmp_path: Path) -> None:
    """Exit code 0 at once; the build and its compiler end too, and leave nothing half written."""
    cache = tmp_path / "cache"
    with serve(tmp_path, *flags(model, cache)) as server:
        deadline = time.monotonic() + 120
        while "build: shard" not in server.log:
            assert server.process.poll() is None, server.log
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert server.stop() == 0
    deadline = time.monotonic() + 60
    while list(cache.rglob(".*partial*")):
        assert time.monotonic() < deadline, "the build goes on"
        time.sleep(0.1)
    assert not list(cache.rglob("manifest.json"))
