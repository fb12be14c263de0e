"""Bundles of tiny models, compiled once per run of the tests and shared by its worker processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shark_llm.artifacts.bundle import Bundle, open_bundle
from shark_llm.build import BuildSettings, build
from shark_llm.errors import SharkError
from shark_llm.runtime.devices import DeviceConfig
from shark_llm.runtime.module import IreeRunner, load_runner
from shark_llm.stages import StageRecord


@dataclass
class RecordingReporter:
    """Keeps what a build says."""

    stages: list[StageRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def start(self, stage: str, what: str) -> None:
        """A stage begins."""

    def progress(self, done: int, total: int) -> None:
        """Bytes of the stage."""

    def finish(self, record: StageRecord) -> None:
        self.stages.append(record)

    def note(self, text: str) -> None:
        self.notes.append(text)


def session_directory(factory: pytest.TempPathFactory) -> Path:
    """A directory of this run of the tests; xdist's workers have it in common."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that other worker processes wait for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def built_bundle(root: Path, name: str, checkpoint: Path, **settings: Any) -> tuple[Bundle, Path]:
    """The bundle `name` below `root` and its dev artifacts, built by whoever comes first."""
    out, dev = root / name / "bundle", root / name / "dev"
    failed = root / f"{name}.failed"
    with locked(root / f"{name}.lock"):
        if failed.exists():  # once is enough to know
            raise AssertionError(f"the build of {name} failed before: {failed.read_text()}")
        if not (out / "manifest.json").exists():
            wanted = BuildSettings(model=str(checkpoint), out_dir=out, dev_dir=dev, **settings)
            try:
                build(wanted, RecordingReporter())
            except SharkError as error:
                failed.write_text(str(error))
                raise
    return open_bundle(out), dev


@contextlib.contextmanager
def running(
    bundle: Bundle, *, tokens: int = 1024, driver: str = "local-task", **options: Any
) -> Iterator[IreeRunner]:
    """The bundle loaded on this machine's CPU, with a pool of `tokens` slots."""
    options: Mapping[str, Any]
    runner = load_runner(bundle, DeviceConfig(driver=driver, **options), tokens)
    try:
        yield runner
    finally:
        runner.close()
