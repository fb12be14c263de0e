"""Stages of a build: timed, with their peak memory, told to whoever shows them."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What one stage took. `peak_memory_bytes` is of this process or of the compiler it ran,
    whichever had more at once; `compiler_peak_bytes` of the latter alone, 0 where there is none."""

    name: str
    seconds: float
    peak_memory_bytes: int
    compiler_peak_bytes: int
    note: str


class Reporter(Protocol):
    """Shows a build to a user."""

    def start(self, stage: str, what: str) -> None:
        """A stage begins."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Bytes of the running stage that are done, of how many."""
        ...

    def finish(self, record: StageRecord) -> None:
        """The stage has ended."""
        ...

    def note(self, text: str) -> None:
        """Something a user should know, one line."""
        ...


@dataclass
class RunningStage:
    """What a stage may say of itself before it ends."""

    note: str = ""
    compiler_peak_bytes: int = 0


@dataclass
class StageClock:
    """Times stages one after the other."""

    reporter: Reporter
    records: list[StageRecord] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[RunningStage]:
        self.reporter.start(name, what)
        _reset_peak()
        started = time.monotonic()
        running = RunningStage()
        yield running
        record = StageRecord(
            name=name,
            seconds=time.monotonic() - started,
            peak_memory_bytes=max(_peak_bytes(), running.compiler_peak_bytes),
            compiler_peak_bytes=running.compiler_peak_bytes,
            note=running.note,
        )
        self.records.append(record)
        self.reporter.finish(record)


def _reset_peak() -> None:
    """Begin a new high-water mark of resident memory, where the kernel lets us."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """The high-water mark of this process's resident memory."""
    peak = peak_resident_bytes(os.getpid())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def peak_resident_bytes(pid: int) -> int | None:
    """The high-water mark of a running process's resident memory, where the kernel tells it."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if found := re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE):
            return int(found[1]) * 1024
    return None
