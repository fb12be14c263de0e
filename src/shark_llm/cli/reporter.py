"""Shows a build on a terminal (one live line, with rich) or as plain lines (logs, pipes)."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from shark_llm.stages import StageRecord

_PLAIN_PROGRESS_SECONDS = 10.0


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

    def close(self) -> None:
        """Nothing to put back."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveReporter:
    """A line a stage; the running one lives: a spinner, seconds, and bytes where it counts them."""

    def __init__(self, console: Console) -> None:
        self._console = console
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
        line = f"✓ {record.name:<8} {stage_summary(record)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(f"  note: {text}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the live line away."""
        self._progress.stop()


class _BytesColumn(ProgressColumn):
    """Seconds so far; with a total also bytes, rate and time left."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        if task.total is None:
            return Text(f"{elapsed:.0f} s")
        return Text(byte_progress(int(task.completed), int(task.total), elapsed))


def make_reporter(console: Console) -> PlainReporter | LiveReporter:
    """Live on a terminal, plain elsewhere."""
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveReporter(console) if live else PlainReporter(console)


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
