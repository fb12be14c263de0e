"""A side of a benchmark in a process of its own: pinned to its cores, told over a pipe what to run.

Standard library only: the peers' environments import it too. One JSON object a line: the parent
writes {"call": name, ...arguments}, the worker answers {"result": ...} or {"error": text}.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

SCRIPTS = Path(__file__).parents[1]


class WorkerError(Exception):
    """A side of the benchmark failed; the message says which and how."""


@contextlib.contextmanager
def on_cpus(cpus: Iterable[int]) -> Iterator[None]:
    """Keep this thread, and the processes that it starts inside the block, on `cpus`.

    The IREE runtime makes one worker for each core of the mask that its process is born with.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def environment(paths: Sequence[Path]) -> dict[str, str]:
    """This process's, with the modules of `paths` before those that are installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


class Worker:
    """The parent's end. `python` runs the module `benchmarks.<module>` on the CPUs `cpus` only.

    It looks for modules in `paths` first.
    """

    def __init__(
        self,
        module: str,
        *,
        python: Path,
        cpus: Sequence[int],
        paths: Sequence[Path] = (SCRIPTS,),
    ) -> None:
        self.module = module
        with on_cpus(cpus):
            self._process = subprocess.Popen(
                [str(python), "-m", f"benchmarks.{module}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(paths),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, **arguments: Any) -> Any:
        """Run one handler to its end. Raises WorkerError when it, or the process, fails."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise WorkerError(f"{self.module} ended with exit code {code} during {name!r}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.module} failed in {name!r}: {answer['error']}")
        return answer["result"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """The worker's end: answer calls until the pipe closes.

    Whatever else prints to standard output is sent to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = {"result": handlers[arguments.pop("call")](**arguments)}
        except Exception as error:  # told to the parent, which ends the run
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
