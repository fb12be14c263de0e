"""What is put under load: a tiny model compiled for this CPU, and servers of it.

The model is the tests' own T0 with room for long answers. Its bundle stays in .cache/load.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.servers import HOST, Server, free_port

import tiny
from load_tests.client import Address
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.engine.settings import EngineSettings
from shark_llm.runtime.devices import DeviceConfig
from shark_llm.runtime.module import load_runner
from shark_llm.runtime.runner import ModelRunner
from shark_llm.server.lifecycle import Life, Loaded, Report, bind
from shark_llm.server.loading import start_engine
from shark_llm.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "load"
BIN = Path(sys.executable).parent
MODEL_LEN = 8192
BATCH_SIZES = {"prefill": (1, 4), "decode": (1, 4, 16)}
PROMPT_TOKENS = range(6, 249)
"""Ids of T0's tokenizer that stand for one byte each."""


class TargetError(Exception):
    """The model was not compiled, or its server did not start."""


def bundle() -> Path:
    """The bundle; shark-compile itself finds what it can reuse of an earlier one."""
    config = tiny.tiny_config(max_position_embeddings=MODEL_LEN)
    checkpoint = tiny.write_tiny(CACHE / "checkpoint", config=config)
    path = CACHE / "bundle"
    command = [str(BIN / "shark-compile"), "--hf-model", str(checkpoint)]
    command += ["--compile-target", "host", "--output-artifacts-dir", str(path)]
    for phase, sizes in BATCH_SIZES.items():
        command += [f"--batch-sizes-{phase}", *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TargetError(f"shark-compile ended with exit code {done.returncode}: {done.stderr}")
    return path


@contextmanager
def process(directory: Path, *flags: str) -> Iterator[tuple[Address, Server]]:
    """shark-serve as a user starts it, in a process of its own."""
    port = free_port()
    command = [str(BIN / "shark-serve"), "--artifacts-dir", str(directory), "--port", str(port)]
    command += ["--log-level", "warning", *flags]
    cpus = sorted(os.sched_getaffinity(0))
    with Server("load", command, port=port, cpus=cpus) as server:
        yield Address(host=HOST, port=port), server


@contextmanager
def in_this_process(
    directory: Path,
    wrap: Callable[[ModelRunner], ModelRunner],
    *,
    kv_cache_tokens: int,
    settings: EngineSettings,
    server_settings: ServerSettings,
) -> Iterator[Address]:
    """The same server on a thread of this process, with something between engine and device."""
    sock = bind(HOST, 0)
    opened = open_bundle(directory)

    def load(report: Report) -> Loaded:
        report("loading")
        runner = wrap(load_runner(opened, DeviceConfig(driver="local-task"), kv_cache_tokens))
        return start_engine(
            runner,
            settings,
            directory=directory,
            manifest=opened.manifest,
            served_model_name=server_settings.served_model_name,
            notes=[],
        )

    life = Life(server_settings, sock, load)
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_until_complete(life.run(handle_signals=False))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        _wait_ready(life, thread)
        yield Address(host=HOST, port=int(sock.getsockname()[1]))
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(life.request_stop)
        thread.join()


def _wait_ready(life: Life, thread: threading.Thread) -> None:
    while life.state.phase == "loading" and thread.is_alive():
        thread.join(0.05)
    if life.state.phase != "ready":
        raise TargetError(f"the server did not start: {life.state.detail}")


def prompt(length: int, *, first: int = 0) -> Sequence[int]:
    """Some prompt of so many tokens."""
    return [PROMPT_TOKENS[(first + 7 * i) % len(PROMPT_TOKENS)] for i in range(length)]
