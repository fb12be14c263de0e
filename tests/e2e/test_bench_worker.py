"""The benchmark's workers: processes on given cores, whose failures reach the parent as a line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmark_samples import worker


def test_a_worker_runs_on_its_cores_and_tells_what_failed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cpu = max(os.sched_getaffinity(0))
    with worker.Worker("stream_worker", python=Path(sys.executable), cpus=[cpu]) as memory:
        pid = memory.pid
        with pytest.raises(worker.WorkerError, match=r"stream_worker failed in 'open': OSError: "):
            memory.call("open", library="/does/not/exist.so")
        assert os.sched_getaffinity(pid) == {cpu}
        with pytest.raises(worker.WorkerError, match="failed in 'dance': KeyError"):
            memory.call("dance")
    assert not Path(f"/proc/{pid}").exists(), "it ends with the block"
    assert "Traceback" in capfd.readouterr().err, "where it failed stands in its standard error"


def test_a_worker_that_does_not_start_is_named() -> None:
    cpus = os.sched_getaffinity(0)
    with (
        worker.Worker("no_such_worker", python=Path(sys.executable), cpus=sorted(cpus)) as missing,
        pytest.raises(
            worker.WorkerError, match=r"no_such_worker ended with exit code 1 during 'x'"
        ),
    ):
        missing.call("x")


def test_cores_are_given_back() -> None:
    before = os.sched_getaffinity(0)

    def work() -> None:
        with worker.on_cpus([min(before)]):
            assert os.sched_getaffinity(0) == {min(before)}
            raise RuntimeError("disturbed")

    with pytest.raises(RuntimeError, match="disturbed"):
        work()
    assert os.sched_getaffinity(0) == before
