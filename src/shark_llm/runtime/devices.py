"""Devices: found by driver and id, opened once, and the only place that moves their bytes.

A rank has one device. `local-task` and `local-sync` are this machine's CPU: they make as many
simulated devices as there are ranks. Those of local-task have a worker pool of their own each: one
thread for every core, dealt out to the ranks (cores.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import iree.runtime as rt
import ml_dtypes
import numpy as np
import numpy.typing as npt
from iree.runtime import _binding

from shark_llm.errors import CapacityError, DeviceError, UsageError
from shark_llm.runtime.cores import (
    confined_to,
    cpus_around,
    running_threads,
    share_cores,
    unpin_workers,
    usable_cores,
)

DRIVERS = ("local-task", "local-sync", "hip", "cuda")
CPU_DRIVERS = ("local-task", "local-sync")
ALLOCATORS = ("default", "caching")
Staging = Literal["auto", "always"]
DTYPES: dict[str, tuple[Any, npt.DTypeLike]] = {
    "i64": (rt.HalElementType.SINT_64, np.int64),
    "f32": (rt.HalElementType.FLOAT_32, np.float32),
    "f16": (rt.HalElementType.FLOAT_16, np.float16),
    "bf16": (rt.HalElementType.BFLOAT_16, ml_dtypes.bfloat16),
}


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Which devices run the ranks, and how memory on them is handled."""

    driver: str
    device_ids: tuple[int, ...] | None = None
    """One per rank; None: 0, 1, 2 ..."""
    allocator: str = "default"
    """`caching` keeps freed buffers for the next step: for long prefills on GPUs."""
    staging: Staging = "auto"
    """How results come back. auto: mapped where the host sees the device's memory, else copied
    through a host buffer that is kept for the next time; always: through the host buffer."""
    cpu_threads: int | None = None
    """Worker threads of all local-task devices together, at least one each; None: one per core, or
    one per rank where there are more ranks."""

    def __post_init__(self) -> None:
        if self.driver not in DRIVERS:
            raise DeviceError(f"no device driver {self.driver!r}: choose from {', '.join(DRIVERS)}")
        if self.allocator not in ALLOCATORS:
            raise UsageError(
                f"--device-allocator is {self.allocator!r}; it must be one of "
                f"{', '.join(ALLOCATORS)}"
            )
        if self.cpu_threads is None:
            return
        if self.driver != "local-task":
            raise UsageError(
                f"--cpu-threads is {self.cpu_threads}, but {self.driver} has no worker threads: "
                "leave it out, or use --device local-task"
            )
        if self.cpu_threads < 1:
            raise UsageError(f"--cpu-threads is {self.cpu_threads}; it must be at least 1")

    def resolved_ids(self, tp: int) -> tuple[int, ...]:
        """The ids of `tp` ranks. Raises DeviceError for a wrong count or one named twice."""
        ids = tuple(range(tp)) if self.device_ids is None else self.device_ids
        shown = " ".join(map(str, ids))
        if len(ids) != tp:
            raise DeviceError(
                f"--device-ids {shown} names {len(ids)} devices, the bundle has tp {tp}: "
                f"name {tp} different ids"
            )
        if len(set(ids)) != len(ids) or min(ids) < 0:
            raise DeviceError(
                f"--device-ids {shown}: every rank needs a device of its own, counted from 0"
            )
        return ids


class DeviceSet:
    """The opened devices of all ranks, in rank order. Close what lives on them first, then this."""

    def __init__(self, config: DeviceConfig, tp: int) -> None:
        ids = config.resolved_ids(tp)
        self.config = config
        self.devices: list[Any] = []
        self._staging: dict[tuple[int, int], Any] = {}  # (rank, bytes) -> host buffer
        self._downloads: dict[tuple[int, tuple[int, ...], str], npt.NDArray[Any]] = {}
        self._threads: list[tuple[frozenset[int], frozenset[int]]] = []
        """Of each simulated device: its threads, and the CPUs for its workers."""
        if config.driver in CPU_DRIVERS:
            self._open_cpu(tp)
        else:
            self._open_gpu(ids)

    def _open_cpu(self, tp: int) -> None:
        cores = usable_cores()
        for share in share_cores(cores, tp, self._worker_threads(tp, len(cores))):
            before = running_threads()
            # A driver for each device: devices of one driver share its worker pool. IREE makes a
            # worker for every core that the thread which creates the driver may run on.
            with confined_to(share):
                driver = _binding.create_hal_driver(self.config.driver)
            self.devices.append(driver.create_default_device(allocators=self._allocators))
            self._threads.append((running_threads() - before, cpus_around(share, cores)))

    def unpin_workers(self) -> None:
        """Once the devices have done something: let their workers move to cores that are free.

        Pinned, they took two to three times as long for a step, with one device as with several,
        when one of two cores had other work; when none had, as long as they do now.
        """
        for threads, cpus in self._threads:
            unpin_workers(threads, cpus)

    def _worker_threads(self, tp: int, num_cores: int) -> int:
        asked = self.config.cpu_threads
        if asked is None:
            return num_cores
        if asked < tp:
            raise UsageError(
                f"--cpu-threads is {asked}, the bundle has tp {tp}: every rank needs a thread, "
                f"give at least {tp}"
            )
        if asked > tp * num_cores:
            raise UsageError(
                f"--cpu-threads is {asked}, and this process may run on {num_cores} cores: with "
                f"tp {tp}, give at most {tp * num_cores}, a thread of every rank on every core"
            )
        return asked

    @property
    def _allocators(self) -> list[str]:
        return [] if self.config.allocator == "default" else [self.config.allocator]

    def _open_gpu(self, ids: Sequence[int]) -> None:
        name = self.config.driver
        try:
            driver = rt.get_driver(name)
            found = driver.query_available_devices()
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"the {name} driver does not start here ({_first_line(error)}): install the GPU "
                "driver, or use a bundle compiled for another target"
            ) from error
        unknown = [i for i in ids if i >= len(found)]
        if unknown:
            raise DeviceError(
                f"--device-ids {' '.join(map(str, ids))}: this machine has {len(found)} {name} "
                f"devices, ids 0 to {len(found) - 1}"
            )
        for i in ids:
            device_id = found[i]["device_id"]
            self.devices.append(driver.create_device(device_id, allocators=self._allocators))

    def upload(self, rank: int, array: npt.NDArray[Any], dtype: str) -> Any:
        """A buffer view of `array` on the rank's device. `dtype` is one of DTYPES."""
        element_type, numpy_type = DTYPES[dtype]
        contiguous = np.ascontiguousarray(array, dtype=numpy_type)
        if dtype == "bf16":  # not a type of Python's buffer protocol
            contiguous = contiguous.view(np.uint16)
        return self.devices[rank].allocator.allocate_buffer_copy(
            memory_type=rt.MemoryType.DEVICE_LOCAL,
            allowed_usage=rt.BufferUsage.DEFAULT,
            device=self.devices[rank],
            buffer=contiguous,
            element_type=element_type,
        )

    def allocate(self, rank: int, shape: Sequence[int], dtype: str) -> Any:
        """An uninitialized buffer view on the rank's device. CapacityError: it does not fit."""
        element_type, numpy_type = DTYPES[dtype]
        num_bytes = math.prod(shape) * np.dtype(numpy_type).itemsize
        try:
            buffer = self.devices[rank].allocator.allocate_buffer(
                memory_type=rt.MemoryType.DEVICE_LOCAL,
                allowed_usage=rt.BufferUsage.DEFAULT,
                allocation_size=num_bytes,
            )
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"rank {rank} has no {num_bytes} bytes left for a KV cache ({_first_line(error)}): "
                "lower --kv-cache-tokens"
            ) from error
        return rt.HalBufferView(buffer, list(shape), element_type)

    def download(self, rank: int, view: Any, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """The contents of a result on the rank's device, in host memory of our own that the next
        download of that rank, shape and dtype overwrites. `dtype` is one of DTYPES."""
        buffer = view.get_buffer()
        visible = buffer.memory_type() & int(rt.MemoryType.HOST_VISIBLE)
        if self.config.staging == "always" or not visible:
            buffer = self._staged(rank, buffer, view.byte_length)
        numpy_type = np.dtype(DTYPES[dtype][1])
        flat = buffer.map().asarray([buffer.byte_length()], np.dtype(np.uint8))
        # Always the same memory: pages that are new to the process cost more than the copy.
        key = rank, tuple(shape), dtype
        mine = self._downloads.get(key)
        if mine is None:
            mine = self._downloads[key] = np.empty(tuple(shape), numpy_type)
        mine.reshape(-1)[:] = flat[: mine.nbytes].view(numpy_type)
        return mine

    def _staged(self, rank: int, source: Any, num_bytes: int) -> Any:
        """Copy a device buffer into this rank's host buffer, wait for it, and return that."""
        device = self.devices[rank]
        target = self._staging.get((rank, num_bytes))
        if target is None:
            target = device.allocator.allocate_buffer(
                memory_type=rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE,
                allowed_usage=rt.BufferUsage.TRANSFER | rt.BufferUsage.MAPPING,
                allocation_size=num_bytes,
            )
            self._staging[rank, num_bytes] = target
        done = device.create_semaphore(0)
        device.queue_copy(source, target, [], [(done, 1)])
        done.wait(1)
        return target

    @contextmanager
    def given_way(self) -> Iterator[None]:
        """Around a call that waits for the devices: local-task's workers run before this thread.

        IREE's wait spins for a moment before it sleeps. Where the workers have all cores, a waiting
        thread that spins, and preempts a worker each time it wakes, takes half of a decode step. A
        thread of the kernel's batch class does neither to the workers.
        """
        is_normal = (
            self.config.driver == "local-task" and os.sched_getscheduler(0) == os.SCHED_OTHER
        )
        if not is_normal:  # a policy that somebody chose is theirs
            yield
            return
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            yield
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    def close(self) -> None:
        """Release buffers, then the devices. Idempotent."""
        self._staging.clear()
        self.devices.clear()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
