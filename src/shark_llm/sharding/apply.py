"""Cut a checkpoint into the archives of a plan in one pass and little memory; and the inverse.

Two threads take block after block, rows of a parameter, to the archives: read, cast or quantized
where they are to be, and cut.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shark_llm.artifacts.irpa import ArchiveReader, ArchiveWriter, Identity, archive_name
from shark_llm.artifacts.manifest import Placement, Replicate
from shark_llm.checkpoint.source import Checkpoint, read_into
from shark_llm.errors import CheckpointError
from shark_llm.sharding.archives import archive_entries, identity_of
from shark_llm.sharding.plan import parameter_key, parameter_shapes, scale_name
from shark_llm.sharding.quantize import quantize

BLOCK_BYTES = 2 << 20
"""Less makes many small writes of a rank's part; more leaves the processor's caches."""
THREADS = 2
"""More than one core; more of them would only wait for memory and disk."""

TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
STORED_DTYPES = TORCH_DTYPES | {"i8": torch.int8}

Progress = Callable[[int, int], None]
"""Called with (bytes of the checkpoint done, bytes in all)."""


def write_archives(
    checkpoint: Checkpoint,
    plan: Mapping[str, Placement],
    *,
    identity: Identity,
    out_dir: Path,
    progress: Progress | None = None,
) -> list[Path]:
    """Write model.irpa and model.rank{r}.irpa into `out_dir` and return their paths.

    `identity` gives model digest, tp and dtype (f32, f16 or bf16); its rank is not read. A plan
    with scales quantizes. Every row of the checkpoint is read once. Raises CheckpointError when a
    finite value has no finite counterpart in the dtype, or one that is not finite is to be
    quantized, UsageError for an unknown dtype, CapacityError when the disk is full.
    """
    config, dtype = checkpoint.config, TORCH_DTYPES.get(identity.dtype)
    entries = archive_entries(config, plan, tp=identity.tp, dtype=identity.dtype)
    assert dtype is not None, "archive_entries refuses unknown dtypes"
    shapes = parameter_shapes(config)
    found = {name: info.shape for name, info in checkpoint.parameters.items()}
    assert found == shapes, f"not the model's parameters: {found.items() ^ shapes.items()}"
    blocks = [
        (name, start, stop)
        for name, info in checkpoint.parameters.items()
        for start, stop in _row_blocks(info.shape, max(info.dtype.itemsize, dtype.itemsize))
    ]
    total = sum(info.num_bytes for info in checkpoint.parameters.values())
    done = 0
    with ExitStack() as stack:
        stack.enter_context(_one_torch_thread())
        writers = {
            rank: stack.enter_context(
                ArchiveWriter(out_dir / archive_name(rank), identity_of(identity, rank), of_rank)
            )
            for rank, of_rank in entries.items()
        }
        job = _Job(checkpoint=checkpoint, plan=plan, dtype=dtype, writers=writers)
        # Closed before the archives are, whatever happens: until then threads write to them.
        for name, start, stop in stack.enter_context(closing(_in_order(job.write, blocks))):
            info = checkpoint.parameters[name]
            done += (stop - start) * (info.num_bytes // info.shape[0])
            if progress is not None:
                progress(done, total)
    return [writer.path for writer in writers.values()]


def merge_parameter(
    archives: Mapping[int | None, ArchiveReader],
    name: str,
    placement: Placement,
    shape: tuple[int, ...],
) -> npt.NDArray[Any]:
    """The whole parameter from the archives by rank (None: the shared one): undoes the split.

    bf16 comes as u16 bits. Every element must be held by some rank.
    """
    if isinstance(placement, Replicate):
        return archives[None].read(name)
    whole: npt.NDArray[Any] | None = None
    covered = np.zeros(shape[placement.dim], bool)
    for rank, (start, stop) in enumerate(placement.ranges):
        if start == stop:
            continue
        part = archives[rank].read(parameter_key(name, placement, rank))
        if whole is None:
            whole = np.empty(shape, part.dtype)
        whole[(slice(None),) * placement.dim + (slice(start, stop),)] = part
        covered[start:stop] = True
    assert whole is not None, f"{name}: no rank has it"
    assert covered.all(), f"{name}: the plan leaves a gap"
    return whole


def _row_blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    row_bytes = math.prod(shape[1:]) * itemsize
    rows = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


Block = tuple[str, int, int]


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Keep torch's casts on the thread that asks: on a busy two-core machine, where threads wait
    for the slowest of them, writing took 3.5 to 5 times as long with torch's default of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _in_order(
    write: Callable[[str, int, int], None], blocks: Iterable[Block]
) -> Generator[Block, None, None]:
    """Write the blocks, a few at a time; each one comes when it and all before it are written."""
    with ThreadPoolExecutor(THREADS) as pool:
        running: deque[tuple[Block, Future[None]]] = deque()
        for block in blocks:
            running.append((block, pool.submit(write, *block)))
            if len(running) > 2 * THREADS:
                first, future = running.popleft()
                future.result()
                yield first
        for block, future in running:
            future.result()
            yield block


class _Scratch(threading.local):
    """Memory of a thread, the same for every block: what is fresh costs a page fault a page."""

    def __init__(self) -> None:
        self._kept: dict[str, npt.NDArray[np.uint8]] = {}

    def take(self, use: str, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Bytes whose content is whatever it is, valid until the same use takes others."""
        kept = self._kept.get(use)
        if kept is None or len(kept) < num_bytes:
            kept = self._kept[use] = np.empty(num_bytes, dtype=np.uint8)
        return kept[:num_bytes]

    def tensor(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The same as a tensor."""
        held = self.take(use, math.prod(shape) * dtype.itemsize)
        return torch.from_numpy(held).view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Takes rows from the checkpoint to the archives; from any thread."""

    checkpoint: Checkpoint
    plan: Mapping[str, Placement]
    dtype: torch.dtype
    writers: Mapping[int | None, ArchiveWriter]
    scratch: _Scratch = field(default_factory=_Scratch)

    def write(self, name: str, start: int, stop: int) -> None:
        """Rows start .. stop - 1 of a parameter."""
        for stored, rows in self._stored(name, start, stop):
            placement = self.plan[stored]
            for rank, (low, high), first, columns in _parts(placement, start, stop):
                part = rows[low - start : high - start]
                if columns is not None:
                    itemsize = rows.shape[1] // self.checkpoint.parameters[name].shape[1]
                    cut = part[:, columns.start * itemsize : columns.stop * itemsize]
                    part = self.scratch.take("cut", cut.size).reshape(cut.shape)
                    np.copyto(part, cut)
                key = stored if rank is None else parameter_key(stored, placement, rank)
                self.writers[rank].write(key, part.data, at=(low - first) * part.shape[1])

    def _stored(self, name: str, start: int, stop: int) -> list[tuple[str, npt.NDArray[np.uint8]]]:
        """What is stored of some rows, by name, as (rows, bytes of a row): themselves in the dtype
        of the archives, or quantized with their scales, which are of whole rows whoever will hold
        which columns."""
        info, extent = self.checkpoint.parameters[name], self.checkpoint.extent(name)
        if extent is None:
            rows = self.checkpoint.read(name, start, stop)
        else:
            row_bytes = info.num_bytes // info.shape[0]
            held = self.scratch.take("read", (stop - start) * row_bytes)
            read_into(held.data, extent.path, extent.offset + start * row_bytes)
            if info.dtype == self.dtype and scale_name(name) not in self.plan:
                return [(name, held.reshape(stop - start, row_bytes))]  # nobody looks at the values
            rows = torch.from_numpy(held).view(info.dtype).view(stop - start, *info.shape[1:])
        if scale_name(name) in self.plan:
            if not rows.isfinite().all():
                raise CheckpointError(
                    f"{name} has values that are not finite, which int8 cannot hold: repair the "
                    "checkpoint"
                )
            q, scale = quantize(rows)
            return [(name, _bytes(q)), (scale_name(name), _bytes(scale))]
        if rows.dtype == self.dtype:
            return [(name, _bytes(rows))]
        shape = tuple(rows.shape)
        cast = self.scratch.tensor("cast", shape, self.dtype)
        if torch.float32 in (rows.dtype, self.dtype):
            cast.copy_(rows)
        else:  # by way of f32, which has all their values: bf16 to f16 at once is scalar code
            cast.copy_(self.scratch.tensor("wide", shape, torch.float32).copy_(rows))
        _check_finite(name, rows, cast)
        return [(name, _bytes(cast))]


def _parts(
    placement: Placement, start: int, stop: int
) -> Iterator[tuple[int | None, tuple[int, int], int, slice | None]]:
    """(rank, rows, the first row that it has of all, columns) of what each archive takes of rows
    start .. stop - 1."""
    if isinstance(placement, Replicate):
        yield None, (start, stop), 0, None
        return
    for rank, (first, last) in enumerate(placement.ranges):
        if placement.dim == 1 and first < last:
            yield rank, (start, stop), 0, slice(first, last)
        low, high = max(first, start), min(last, stop)
        if placement.dim == 0 and low < high:
            yield rank, (low, high), first, None


def _check_finite(name: str, rows: torch.Tensor, cast: torch.Tensor) -> None:
    """Raise CheckpointError where a finite value has become infinite."""
    extremes = cast.aminmax()  # one cheap pass, and nearly always enough
    if all(math.isfinite(extreme.item()) for extreme in extremes):
        return
    if (cast.isinf() & rows.isfinite()).any():
        largest = rows[rows.isfinite()].abs().max().item()
        raise CheckpointError(
            f"{name} has values up to {largest:g}, {cast.dtype} ends at "
            f"{torch.finfo(cast.dtype).max:g}: use --dtype "
            f"{'bf16' if cast.dtype == torch.float16 else 'f32'}"
        )


def _bytes(rows: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Contiguous rows as (rows, bytes of a row), without a copy."""
    held: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy().reshape(len(rows), -1)
    return held
