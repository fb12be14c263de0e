"""shark-compile as a process of its own, for a server that builds what it serves.

The server has neither torch nor the compiler in its process, then or later: what they take goes
back to the machine when the bundle is there. See `cli.reporter` for the lines that are read here.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from shark_llm import errors
from shark_llm.errors import CompileError, SharkError, UsageError

if TYPE_CHECKING:
    from shark_llm.server.lifecycle import Report

logger = logging.getLogger("shark_llm.build")

COMMAND = (sys.executable, "-m", "shark_llm.cli.compile")
_LOG_SECONDS = 10.0  # between two lines about the bytes of one stage
_ERROR_PREFIX = "shark-compile: error: "


def run_build(argv: Sequence[str], report: Report, environment: Mapping[str, str]) -> None:
    """Run shark-compile with `argv` to its end. `environment` adds to this process's.

    Every stage is logged and reported; reports name no files, since they are for everybody who asks
    /health. Raises what the build has raised, by its class in `errors`. The build ends with this
    process, whatever ends that.
    """
    report("building the bundle: starting")
    process = subprocess.Popen(
        [*COMMAND, *argv, "--progress", "json", "--end-with-stdin"],
        stdin=subprocess.PIPE,  # never written to: its end tells the build that we are gone
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    last_words: deque[str] = deque(maxlen=1)
    passing_on = threading.Thread(target=_pass_on, args=(process.stderr, last_words), daemon=True)
    passing_on.start()
    watch = _Watch(report)
    try:
        for line in process.stdout:
            watch.take(line)
        process.wait()
    finally:
        process.stdin.close()  # ends the build if it has not ended
        process.wait()
        passing_on.join()
        process.stdout.close()
        process.stderr.close()
    if process.returncode:
        raise watch.failure or _failure(process.returncode, last_words)


class _Watch:
    """Reads a build's events."""

    def __init__(self, report: Report) -> None:
        self.failure: SharkError | None = None
        self._report = report
        self._last = time.monotonic()

    def take(self, line: str) -> None:
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError:  # what some library prints is no event
            logger.info("build: %s", line.rstrip())
            return
        stage = event.get("stage")
        match event["event"]:
            case "start":
                self._last = time.monotonic()
                logger.info("build: %-8s %s", stage, event["what"])
                self._report(f"building the bundle: {stage}")
            case "progress":
                percent = 100 * event["done"] / max(1, event["total"])
                self._report(f"building the bundle: {stage}, {event['text']}", percent)
                if time.monotonic() - self._last >= _LOG_SECONDS:
                    self._last = time.monotonic()
                    logger.info("build: %-8s %s", stage, event["text"])
            case "finish":
                note = f" ({event['note']})" if event["note"] else ""
                logger.info("build: %-8s %.1f s%s", stage, event["seconds"], note)
            case "note":
                logger.warning("build: %s", event["text"])
            case "error":
                self.failure = _known_error(event["class"], event["message"])


def _known_error(name: str, message: str) -> SharkError:
    """The error that the build raised, as it would have been raised here."""
    kind = getattr(errors, name, None)
    known = isinstance(kind, type) and issubclass(kind, SharkError)
    error: SharkError = kind(message) if known and kind is not None else CompileError(message)
    return error


def _failure(code: int, last_words: Sequence[str]) -> SharkError:
    """What to raise for a build that ended without an event that says why."""
    said = last_words[-1] if last_words else "it said nothing"
    if said.startswith(_ERROR_PREFIX):
        kind = UsageError if code == UsageError.exit_code else CompileError
        return kind(said.removeprefix(_ERROR_PREFIX))
    return CompileError(f"shark-compile ended with exit code {code} ({said}): see its output above")


def _pass_on(lines: IO[str], last_words: deque[str]) -> None:
    """The build's own errors are raised here; the rest is for who reads ours."""
    for line in lines:
        if line.strip():
            last_words.append(line.strip())
        if not line.startswith(_ERROR_PREFIX):
            sys.stderr.write(line)
