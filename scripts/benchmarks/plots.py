"""Plots of docs/performance.md: tokens per second over batch size, context or streams.

matplotlib has an environment of its own, as the peers have: nothing else here needs it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from benchmarks import peers
from benchmarks.results import OURS, LoadSeries, Result, StepCase, paired_ratios
from benchmarks.worker import SCRIPTS, environment

MATPLOTLIB = "matplotlib==3.11.2"
ENVIRONMENT = peers.CACHE / "matplotlib"
X_LABELS = {
    "decode": "rows of a step",
    "context": "tokens of context",
    "prefill": "tokens of a prompt",
    "serve": "streams",
}
LEAST_POINTS = 3
"""Fewer are better read in the table."""


def name(result: Result) -> str | None:
    """The file of a result's plot, beside its samples; None: it has none."""
    panels = _panels(result)
    if not panels or max(len(panel["x"]) for panel in panels) < LEAST_POINTS:
        return None
    return f"{result.benchmark}-{result.dtype}.svg"


def digest(samples: Path) -> str:
    """What a plot says of the samples that it was drawn from."""
    return hashlib.sha256(samples.read_bytes()).hexdigest()[:16]


def draw(kept: Iterable[tuple[Path, Result]]) -> None:
    """Draw the plots of results, each beside the file of its samples."""
    charts = [
        {
            "path": str(path.with_name(file)),
            "title": f"{result.model}, {result.dtype}: {result.benchmark}, tokens per second",
            "source": digest(path),
            "x_label": X_LABELS[result.benchmark],
            "y_label": "tok/s, median and range of rounds",
            "panels": _panels(result),
        }
        for path, result in kept
        if (file := name(result)) is not None
    ]
    if charts:
        command = [str(_python()), "-m", "benchmarks.plot_worker"]
        done = subprocess.run(
            command, input=json.dumps(charts), text=True, env=environment([SCRIPTS])
        )
        if done.returncode != 0:
            raise peers.PeerError(f"the plots failed ({done.returncode}); the reason is above")


def _panels(result: Result) -> list[dict[str, Any]]:
    """One for each number of cores."""
    if result.benchmark not in X_LABELS:
        return []
    cores = dict.fromkeys(
        [*(case.cores for case in result.steps), *(case.cores for case in result.serve)]
    )
    return [
        {
            "title": f"{count} {'core' if count == 1 else 'cores'}",
            **(_served(result, count) if result.serve else _stepped(result, count)),
        }
        for count in cores
    ]


def _stepped(result: Result, cores: int) -> dict[str, Any]:
    cases = [case for case in result.steps if case.cores == cores]
    by_batch = result.benchmark == "decode"
    if not by_batch:  # of several batches, the smallest
        cases = [case for case in cases if case.batch == min(case.batch for case in cases)]
    cases.sort(key=lambda case: (case.batch, case.context))
    sides = [OURS, *dict.fromkeys(peer for case in cases for peer in case.peers)]
    return {
        "x": [case.batch if by_batch else case.context for case in cases],
        "lines": [_line(side, [_step_rates(case, side) for case in cases]) for side in sides],
    }


def _step_rates(case: StepCase, side: str) -> list[float]:
    """tok/s of each round."""
    seconds = [r.seconds for r in case.side(side).rounds]
    return paired_ratios([case.tokens] * len(seconds), seconds)


def _served(result: Result, cores: int) -> dict[str, Any]:
    cases = sorted(
        (case for case in result.serve if case.cores == cores), key=lambda case: case.concurrency
    )
    sides = dict.fromkeys(series.side for case in cases for series in case.series)

    def series(side: str) -> list[LoadSeries]:
        return [next(s for s in case.series if s.side == side) for case in cases]

    return {
        "x": [case.concurrency for case in cases],
        "lines": [
            _line(side, [[r.rate for r in s.rounds] for s in series(side)]) for side in sides
        ],
    }


def _line(side: str, rates: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A side's rates at each x."""
    return {
        "label": side,
        "y": [round(statistics.median(of), 2) for of in rates],
        "low": [round(min(of), 2) for of in rates],
        "high": [round(max(of), 2) for of in rates],
    }


def _python() -> Path:
    """The Python that has matplotlib; the first call makes its environment."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "stamp"
    peers.CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(peers.CACHE / "matplotlib.lock"):
        if not (stamp.exists() and stamp.read_text() == MATPLOTLIB):
            print(f"bench: installing {MATPLOTLIB}", flush=True)
            shutil.rmtree(ENVIRONMENT, ignore_errors=True)
            log = peers.CACHE / "matplotlib.log"
            log.write_bytes(b"")
            peers.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], log)
            peers.run([str(python), "-m", "pip", "install", "--no-input", MATPLOTLIB], log)
            stamp.write_text(MATPLOTLIB)
    return python
