"""Which CPU cores each rank's workers have: the cores of this machine, dealt out to the ranks.

IREE makes a worker for each core that the thread which makes the pool may run on, and pins it
there. So the share of a rank decides how many workers it has, and on which socket. Pinned they
would wait for whatever else runs on their core, and every step for the slowest of them: once they
have started, they may move over all cores of the socket.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")

Core = tuple[int, ...]
"""The CPU numbers of one core: several where it has hyperthreads."""


def usable_cores() -> list[Core]:
    """The cores this thread may run on, those of one socket together."""
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _topology(cpu, "thread_siblings_list") or str(cpu)
        cores.setdefault((_socket(cpu), siblings), []).append(cpu)
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


def cpus_around(share: Sequence[Core], cores: Sequence[Core]) -> frozenset[int]:
    """The CPUs of all `cores` on the sockets of `share`: as near to the memory of its rank."""
    sockets = {_socket(core[0]) for core in share}
    return frozenset(cpu for core in cores if _socket(core[0]) in sockets for cpu in core)


def running_threads() -> frozenset[int]:
    """The ids of this process's threads."""
    return frozenset(int(task.name) for task in _TASKS.iterdir())


def unpin_workers(threads: Iterable[int], cpus: frozenset[int]) -> None:
    """Let those of `threads` that are IREE's workers run on all of `cpus`.

    A worker pins itself as the first thing it does, right after it has named itself: wait until it
    has worked.
    """
    for thread in threads:
        # It may have ended meanwhile: not every thread is a worker.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (_TASKS / str(thread) / "comm").read_text().startswith("iree-worker"):
                os.sched_setaffinity(thread, cpus)


def _socket(cpu: int) -> int:
    return int(_topology(cpu, "physical_package_id") or 0)


def _topology(cpu: int, name: str) -> str:
    try:
        return (_CPUS / f"cpu{cpu}" / "topology" / name).read_text().strip()
    except OSError:  # no such file where /sys is not mounted
        return ""
