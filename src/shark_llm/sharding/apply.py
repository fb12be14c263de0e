"""Cut a checkpoint into the archives of a plan in one pass and little memory; and the inverse.

Two threads take block after block, rows of a parameter, to the archives, in one of three ways:

    copied     whole rows that lie in a file as they shall lie in the archives: by the kernel, which
               moves the bytes once
    cast, cut  other rows: read, and written in pieces of a buffer that stays in the core's cache,
               where a cast and a cut are cheap
    quantized  the same, each row with its scale
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from shark_llm.artifacts.irpa import ArchiveReader, ArchiveWriter, Identity, archive_name
from shark_llm.artifacts.manifest import Placement, Replicate
from shark_llm.checkpoint.source import Checkpoint, FileExtent, cut_short
from shark_llm.errors import CheckpointError
from shark_llm.sharding.archives import archive_entries, identity_of
from shark_llm.sharding.plan import parameter_key, parameter_shapes, scale_name
from shark_llm.sharding.quantize import quantize

# A block is read again soon after it was read, while it is in a cache: blocks of 8 MiB took up to
# six times as long as this on a busy machine. Not less, so that a rank's part at tp 8 is a write of
# 256 KiB: those of 32 KiB took twice as long.
BLOCK_BYTES = 2 << 20
THREADS = 2
"""More than one core, for what is cast; more of them would only wait for memory and disk."""
COPY_BYTES = 16 << 20
"""What the kernel copies at once."""
PIECE_BYTES = 256 << 10
"""Of the archives, what is cast and cut at once: fits the second-level cache of a core."""

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
    extents = {name: _extent(checkpoint, name, plan[name], dtype) for name in shapes}
    blocks = [
        (name, start, stop)
        for name, info in checkpoint.parameters.items()
        for start, stop in _row_blocks(
            info.shape,
            max(info.dtype.itemsize, dtype.itemsize),
            BLOCK_BYTES if extents[name] is None else COPY_BYTES,
        )
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
        job = _Job(checkpoint=checkpoint, plan=plan, extents=extents, dtype=dtype, writers=writers)
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


def _row_blocks(
    shape: tuple[int, ...], itemsize: int, block_bytes: int
) -> Iterator[tuple[int, int]]:
    row_bytes = math.prod(shape[1:]) * itemsize
    rows = max(1, block_bytes // row_bytes)
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


def _extent(
    checkpoint: Checkpoint, name: str, placement: Placement, dtype: torch.dtype
) -> FileExtent | None:
    """Where the parameter can be copied from; None: it has to be cast, cut or computed."""
    if checkpoint.parameters[name].dtype != dtype:
        return None
    if not isinstance(placement, Replicate) and placement.dim != 0:
        return None
    return checkpoint.extent(name)


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


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Takes rows from the checkpoint to the archives; from any thread."""

    checkpoint: Checkpoint
    plan: Mapping[str, Placement]
    extents: Mapping[str, FileExtent | None]
    dtype: torch.dtype
    writers: Mapping[int | None, ArchiveWriter]
    buffers: threading.local = field(default_factory=threading.local)

    def write(self, name: str, start: int, stop: int) -> None:
        """Rows start .. stop - 1 of a parameter."""
        if scale_name(name) in self.plan:
            self._write_quantized(name, start, stop)
            return
        placement, info = self.plan[name], self.checkpoint.parameters[name]
        row_bytes = info.num_bytes // info.shape[0]
        extent = self.extents[name]
        rows = self.checkpoint.read(name, start, stop) if extent is None else None
        for rank, (low, high), first, columns in _parts(placement, start, stop):
            writer = self.writers[rank]
            key = name if rank is None else parameter_key(name, placement, rank)
            if extent is not None:
                source = FileExtent(path=extent.path, offset=extent.offset + low * row_bytes)
                _copy(writer, key, (low - first) * row_bytes, source, (high - low) * row_bytes)
                continue
            assert rows is not None
            part = rows[low - start : high - start]
            part = part if columns is None else part[:, columns]
            at = (low - first) * math.prod(part.shape[1:]) * self.dtype.itemsize
            for piece in self._buffers().pieces(name, part):
                writer.write(key, piece, at)
                at += piece.nbytes

    def _write_quantized(self, name: str, start: int, stop: int) -> None:
        """Scales are of whole rows, whoever will hold which columns."""
        rows = self.checkpoint.read(name, start, stop)
        if not rows.isfinite().all():
            raise CheckpointError(
                f"{name} has values that are not finite, which int8 cannot hold: repair the "
                "checkpoint"
            )
        for stored, whole in zip((name, scale_name(name)), quantize(rows), strict=True):
            placement = self.plan[stored]
            for rank, (low, high), first, columns in _parts(placement, start, stop):
                part = whole[low - start : high - start]
                part = part if columns is None else part[:, columns].contiguous()
                key = stored if rank is None else parameter_key(stored, placement, rank)
                at = (low - first) * math.prod(part.shape[1:]) * part.itemsize
                self.writers[rank].write(key, _bytes(part), at)

    def _buffers(self) -> _Buffers:
        """Of this thread."""
        if not hasattr(self.buffers, "mine"):
            self.buffers.mine = _Buffers.allocate(self.checkpoint, self.dtype)
        mine: _Buffers = self.buffers.mine
        return mine


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


def _copy(writer: ArchiveWriter, key: str, at: int, source: FileExtent, num_bytes: int) -> None:
    """`num_bytes` bytes from `source` to byte `at` of an entry."""
    fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < num_bytes:
            count = writer.copy(key, at + done, fd, source.offset + done, num_bytes - done)
            if count == 0:
                raise cut_short(source.path, source.offset + num_bytes)
            done += count
    finally:
        os.close(fd)


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """Memory that every piece goes through which is cast or cut; each has room for any row."""

    wide: torch.Tensor  # f32
    out: torch.Tensor  # of the dtype of the archives

    @classmethod
    def allocate(cls, checkpoint: Checkpoint, dtype: torch.dtype) -> Self:
        widest = max(math.prod(info.shape[1:]) for info in checkpoint.parameters.values())
        size = max(widest, PIECE_BYTES // dtype.itemsize)
        return cls(wide=torch.empty(size, dtype=torch.float32), out=torch.empty(size, dtype=dtype))

    def pieces(self, name: str, rows: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of rows of the parameter `name`; each is valid until the next one."""
        if rows.dtype == self.out.dtype and rows.is_contiguous():
            yield _bytes(rows)
            return
        step = max(1, len(self.out) // math.prod(rows.shape[1:]))
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            out = self.out[: some.numel()].view(some.shape)
            if torch.float32 in (some.dtype, out.dtype) or some.dtype == out.dtype:
                out.copy_(some)
            else:  # by way of f32, which has all their values: bf16 to f16 at once is scalar code
                out.copy_(self.wide[: some.numel()].view(some.shape).copy_(some))
            if some.dtype != out.dtype:
                _check_finite(name, some, out)
            yield _bytes(out)


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


def _bytes(rows: torch.Tensor) -> memoryview:
    """Of contiguous rows, without a copy."""
    return memoryview(rows.view(torch.uint8).numpy().data)
