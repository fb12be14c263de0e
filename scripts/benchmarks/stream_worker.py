"""The memory's side: how many bytes a second these cores read and write. Kernels are in triad.c."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import worker

ELEMENTS = 8 << 20
"""Of each array, 64 MiB: the three of one core are six times a cache of 32 MiB."""
REPEATS = 3
"""As in STREAM, the best of several passes counts."""
TRIAD_BYTES = 3 * 8 * ELEMENTS
"""STREAM's count; that a store first reads its cache line is not in it."""
READ_BYTES = 8 * ELEMENTS

Arrays = tuple[npt.NDArray[np.float64], ...]


class StreamSide:
    """Three arrays per core, filled by the core that uses them."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))
        self._arrays: dict[int, Arrays] = {}

    def open(self, library: str) -> None:
        """Load the compiled kernels."""
        self._library = ctypes.CDLL(library)
        pointer = ctypes.c_void_p
        self._library.triad.argtypes = [pointer, pointer, pointer, ctypes.c_size_t]
        self._library.triad.restype = None
        self._library.read_sum.argtypes = [pointer, ctypes.c_size_t]
        self._library.read_sum.restype = ctypes.c_double
        self._on_all_cores(self._allocate)

    def round(self) -> dict[str, float]:
        """GB/s of all cores together: {"triad": ..., "read": ...}."""
        cores = len(self._cpus)
        triad = min(self._on_all_cores(self._triad) for _ in range(REPEATS))
        read = min(self._on_all_cores(self._read) for _ in range(REPEATS))
        return {
            "triad": round(cores * TRIAD_BYTES / triad / 1e9, 2),
            "read": round(cores * READ_BYTES / read / 1e9, 2),
        }

    def _allocate(self, cpu: int) -> None:
        self._arrays[cpu] = tuple(np.full(ELEMENTS, float(i)) for i in range(3))

    def _triad(self, cpu: int) -> None:
        self._library.triad(*(array.ctypes.data for array in self._arrays[cpu]), ELEMENTS)

    def _read(self, cpu: int) -> None:
        self._library.read_sum(self._arrays[cpu][0].ctypes.data, ELEMENTS)

    def _on_all_cores(self, work: Callable[[int], None]) -> float:
        """Seconds from the first core's start to the last one's end. ctypes releases the GIL."""
        barrier = threading.Barrier(len(self._cpus))
        spans: list[tuple[float, float]] = []

        def run(cpu: int) -> None:
            os.sched_setaffinity(0, {cpu})  # of this thread alone
            barrier.wait()
            started = time.perf_counter()
            work(cpu)
            spans.append((started, time.perf_counter()))

        threads = [threading.Thread(target=run, args=(cpu,)) for cpu in self._cpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(spans) == len(threads), "a thread failed; its traceback is above"
        return max(end for _, end in spans) - min(start for start, _ in spans)


if __name__ == "__main__":
    side = StreamSide()
    handlers: dict[str, Callable[..., Any]] = {"open": side.open, "round": side.round}
    worker.serve(handlers)
