"""build: what it takes from the checkpoint to a verified bundle, everything new."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence

import model as demo_model

from benchmarks import machine, peers
from benchmarks.peers import PeerError
from benchmarks.results import OURS, Timing
from benchmarks.worker import on_cpus


def measure(dtype: str, cores: Sequence[int], rounds: int) -> list[Timing]:
    """Wall and CPU seconds of shark-compile, of its stages, and the most memory it took."""
    demo_model.fetch()
    timings: list[Timing] = []
    for count in cores:
        values: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, value in _build(dtype, machine.choose_cpus(count)).items():
                values.setdefault(name, []).append(round(value, 2))
        timings.append(Timing(name=OURS, cores=count, values=values))
        print(f"bench: {count} cores: built {rounds} times", flush=True)
    return timings


def _build(dtype: str, cpus: Sequence[int]) -> dict[str, float]:
    room = peers.CACHE / "build"
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    command = peers.compile_command(dtype, room / "bundle", room / "dev")
    command += ["--cache-policy", "off"]  # a build of which nothing is there
    started = time.perf_counter()
    with (room / "log").open("w") as log, on_cpus(cpus):
        process = subprocess.Popen(command, cwd=peers.ROOT, stdout=log, stderr=log)
    # wait4 tells what this child and its own children used.
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        shown = (room / "log").relative_to(peers.ROOT)
        raise PeerError(f"shark-compile ended with exit code {process.returncode}: see {shown}")
    report = json.loads((room / "dev" / "build-report.json").read_text())
    stages = {f"stage_{stage['name']}_s": float(stage["seconds"]) for stage in report["stages"]}
    cpu = used.ru_utime + used.ru_stime
    return {"wall_s": wall, "cpu_s": cpu, "peak_mib": used.ru_maxrss / 1024, **stages}
