"""Timing one step of a model inside the process that runs it. Standard library only: the peers'
environments import it too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")


def machine_busy_seconds() -> float:
    """CPU time that all processes of this machine, and its hypervisor's other guests, have taken.

    From /proc/stat: every column but idle and iowait; guest time is part of user time already.
    """
    columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, columns)
    return (user + nice + system + irq + softirq + steal) / _TICK


def timed(
    step: Callable[[int], None],
    *,
    steps: int,
    warmup: int,
    untimed: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Run step(0), step(1) ...; the first `warmup` are not counted. `untimed(i)` goes before each.

    Returns the fields of `results.Round`: wall microseconds of each step, CPU microseconds of this
    process in all of them, the share of the machine that others took meanwhile, and its load.
    """
    walls: list[int] = []
    cpu = 0
    busy = own = started = 0.0
    for i in range(warmup + steps):
        if i == warmup:
            busy, own, started = machine_busy_seconds(), time.process_time(), time.perf_counter()
        if untimed is not None:
            untimed(i)
        cpu_before, before = time.process_time_ns(), time.perf_counter_ns()
        step(i)
        wall_ns = time.perf_counter_ns() - before
        if i >= warmup:
            walls.append(wall_ns // 1000)
            cpu += (time.process_time_ns() - cpu_before) // 1000
    others = (machine_busy_seconds() - busy) - (time.process_time() - own)
    capacity = (time.perf_counter() - started) * (os.cpu_count() or 1)
    return {
        "wall_us": walls,
        "cpu_us": cpu,
        "others": round(min(1.0, max(0.0, others / capacity)), 3),
        "load": round(os.getloadavg()[0], 2),
    }
