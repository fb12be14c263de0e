"""Which CPU cores each rank's workers have: the cores of this machine, dealt out to the ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")

Core = tuple[int, ...]
"""The CPU numbers of one core: several where it has hyperthreads."""


def usable_cores() -> list[Core]:
    """The cores this thread may run on, those of one socket together."""
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = _CPUS / f"cpu{cpu}" / "topology"
        socket = _read(topology / "physical_package_id") or "0"
        siblings = _read(topology / "thread_siblings_list") or str(cpu)
        cores.setdefault((int(socket), siblings), []).append(cpu)
    return [
        tuple(cpus) for _, cpus in sorted(cores.items(), key=lambda item: (item[0][0], item[1]))
    ]


def share_cores(cores: Sequence[Core], ranks: int, threads: int) -> list[list[Core]]:
    """Each rank's part of `cores`, for `threads` in all: neighbours, one for each of its threads.

    As long as there are cores enough, no two ranks have one in common, and their numbers differ by
    one at most. Beyond that each rank has threads // ranks of them, beginning at its place in turn.
    """
    n = len(cores)
    if ranks <= threads <= n:
        return [
            list(cores[rank * threads // ranks : (rank + 1) * threads // ranks])
            for rank in range(ranks)
        ]
    count = min(n, max(1, threads // ranks))
    return [[cores[(rank * n // ranks + i) % n] for i in range(count)] for rank in range(ranks)]


@contextlib.contextmanager
def confined_to(cores: Sequence[Core]) -> Iterator[None]:
    """This thread runs on `cores` alone: a worker pool that is made meanwhile is made for them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu for core in cores for cpu in core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # no such file where /sys is not mounted
        return ""
