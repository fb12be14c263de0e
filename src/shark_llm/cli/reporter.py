"""Shows a build on a terminal (one live line, with rich), as plain lines (logs, pipes) or as JSON.

JSON lines, of which `shark-serve --model-path` reads a build:

    {"event": "start", "stage", "what"}               a stage begins
    {"event": "progress", "stage", "done", "total", "text"}   bytes; at most ten times a second
    {"event": "finish", "stage", "seconds", "note"}   it has ended
    {"event": "note", "text"}                         something a user should know
    {"event": "error", "class", "message"}            a class of shark_llm.errors; the last line
    {"event": "done", "lines"}                        what the command would print; the last line
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from shark_llm.artifacts.manifest import ByteProgress
from shark_llm.errors import SharkError
from shark_llm.stages import Reporter, StageRecord

_JSON_PROGRESS_SECONDS = 0.1
_PLAIN_PROGRESS_SECONDS = 10.0


class CommandReporter(Reporter, Protocol):
    """A reporter with what a command tells it besides."""

    def fail(self, error: SharkError) -> None:
        """The build has failed; the command says so itself."""
        ...

    def say(self, lines: Sequence[str]) -> None:
        """The last words of a command that has done its work."""
        ...

    def close(self) -> None:
        """Take what lives on the terminal away."""
        ...


class PlainReporter:
    """One line when a stage begins and one when it ends; long ones say how far they are."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._started = self._last = 0.0

    def start(self, stage: str, what: str) -> None:
        self._stage, self._started = stage, time.monotonic()
        self._last = self._started
        self._print(f"{stage:<8} {what}")

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= _PLAIN_PROGRESS_SECONDS:
            self._last = now
            self._print(f"{self._stage:<8} {byte_progress(done, total, now - self._started)}")

    def finish(self, record: StageRecord) -> None:
        self._print(f"{record.name:<8} {stage_summary(record)}")

    def note(self, text: str) -> None:
        self._print(f"note     {text}")

    def fail(self, error: SharkError) -> None:
        """The command's own line is enough."""

    def say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._print(line)

    def close(self) -> None:
        """Nothing to put back."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveReporter(PlainReporter):
    """A line a stage; the running one lives: a spinner, seconds, and bytes where it counts them."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[stage]:<8}"),
            TextColumn("{task.description}", markup=False),
            _BytesColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._progress.start()

    def start(self, stage: str, what: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, stage=stage, total=None)

    def progress(self, done: int, total: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def finish(self, record: StageRecord) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._print(f"✓ {record.name:<8} {stage_summary(record)}")

    def note(self, text: str) -> None:
        self._print(f"  note: {text}")

    def close(self) -> None:
        """Take the live line away."""
        self._progress.stop()


class JsonReporter:
    """One JSON object a line on standard output."""

    def __init__(self) -> None:
        self._stage = ""
        self._started = self._last = 0.0

    def start(self, stage: str, what: str) -> None:
        self._stage, self._started = stage, time.monotonic()
        self._last = 0.0
        _print_json(event="start", stage=stage, what=what)

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < _JSON_PROGRESS_SECONDS and done < total:
            return
        self._last = now
        text = byte_progress(done, total, now - self._started)
        _print_json(event="progress", stage=self._stage, done=done, total=total, text=text)

    def finish(self, record: StageRecord) -> None:
        _print_json(
            event="finish", stage=record.name, seconds=round(record.seconds, 3), note=record.note
        )

    def note(self, text: str) -> None:
        _print_json(event="note", text=text)

    def fail(self, error: SharkError) -> None:
        _print_json(event="error", **{"class": type(error).__name__}, message=str(error))

    def say(self, lines: Sequence[str]) -> None:
        _print_json(event="done", lines=list(lines))

    def close(self) -> None:
        """Nothing to put back."""


def _print_json(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class _BytesColumn(ProgressColumn):
    """Seconds so far; with a total also bytes, rate and time left."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        if task.total is None:
            return Text(f"{elapsed:.0f} s")
        return Text(byte_progress(int(task.completed), int(task.total), elapsed))


def make_reporter(console: Console, *, as_json: bool = False) -> CommandReporter:
    """Live on a terminal, plain elsewhere, unless JSON is asked for."""
    if as_json:
        return JsonReporter()
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveReporter(console) if live else PlainReporter(console)


def end_when_closed(fd: int) -> None:
    """Send this process a SIGTERM when the pipe ends: whoever held its other end has gone."""

    def watch() -> None:
        # Not a file object's read: the interpreter cannot end while a daemon thread is in one.
        while os.read(fd, 1 << 16):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-stdin", daemon=True).start()


@contextmanager
def live_bytes(what: str) -> Iterator[ByteProgress | None]:
    """Bytes of one work on the terminal of standard error, gone at the end; None without one."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), _BytesColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def byte_progress(done: int, total: int, seconds: float) -> str:
    """`120 of 480 MB (25 %), 40 MB/s, 9 s left`; the rate is the mean so far."""
    share = 100 * done // max(1, total)
    text = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB ({share} %)"
    if done <= 0 or seconds <= 0:
        return text
    rate = done / seconds
    return f"{text}, {rate / 1e6:.0f} MB/s, {max(0, total - done) / rate:.0f} s left"


def stage_summary(record: StageRecord) -> str:
    """`12.3 s, 410 MB peak (reused)`."""
    note = f" ({record.note})" if record.note else ""
    return f"{record.seconds:.1f} s, {record.peak_memory_bytes / 1e6:.0f} MB peak{note}"
