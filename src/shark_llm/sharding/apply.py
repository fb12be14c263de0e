"""Cut a checkpoint into the archives of a plan in one pass and little memory; and the inverse.

Block by block of <= 2 MiB, rows of a parameter go to the archives in one of two ways:

    copied     whole rows that lie in a file as they shall lie in the archives: by the kernel, which
               moves the bytes once
    cast, cut  all others: read, by a thread while the block before is written; and written in
               pieces of a buffer that stays in the core's cache, where a cast and a cut are cheap
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
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
from shark_llm.sharding.plan import parameter_key, parameter_shapes

# A block is read again soon after it was read, while it is in a cache: blocks of 8 MiB took up to
# six times as long as this on a busy machine. Not less, so that a rank's part at tp 8 is a write of
# 256 KiB: those of 32 KiB took twice as long.
BLOCK_BYTES = 2 << 20
PIECE_BYTES = 256 << 10
"""Of the archives, what is cast and cut at once: fits the second-level cache of a core."""

TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

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

    `identity` gives model digest, tp and dtype (f32, f16 or bf16); its rank is not read. Every row
    of the checkpoint is read once. Raises CheckpointError when a finite value has no finite
    counterpart in the dtype, UsageError for an unknown dtype, CapacityError when the disk is full.
    """
    config, dtype = checkpoint.config, TORCH_DTYPES.get(identity.dtype)
    entries = archive_entries(config, plan, tp=identity.tp, dtype=identity.dtype)
    assert dtype is not None, "archive_entries refuses unknown dtypes"
    shapes = parameter_shapes(config)
    found = {name: info.shape for name, info in checkpoint.parameters.items()}
    assert found == shapes, f"not the model's parameters: {found.items() ^ shapes.items()}"
    extents = {name: _extent(checkpoint, plan[name], name, dtype) for name in shapes}
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
        computed = [block for block in blocks if extents[block[0]] is None]
        ahead = stack.enter_context(closing(_read_ahead(checkpoint, computed)))
        buffers = _Buffers.allocate(checkpoint, dtype)
        for name, start, stop in blocks:
            placement, extent = plan[name], extents[name]
            row_bytes = checkpoint.parameters[name].num_bytes // shapes[name][0]
            rows = next(ahead) if extent is None else None
            for rank, (low, high), columns in _parts(placement, start, stop):
                key = name if rank is None else parameter_key(name, placement, rank)
                if extent is not None:
                    _copy(writers[rank], key, extent, low * row_bytes, high * row_bytes)
                else:
                    assert rows is not None
                    part = rows[low - start : high - start]
                    part = part if columns is None else part[:, columns]
                    for piece in buffers.pieces(name, part):
                        writers[rank].write(key, piece)
            done += (stop - start) * row_bytes
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
    """Cast on this thread alone: on a busy two-core machine, where threads wait for the slowest of
    them, writing with a cast took 3.5 to 5 times as long with torch's default of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _extent(
    checkpoint: Checkpoint, placement: Placement, name: str, dtype: torch.dtype
) -> FileExtent | None:
    """Where the parameter can be copied from; None: it has to be cast, cut or computed."""
    if checkpoint.parameters[name].dtype != dtype:
        return None
    if not isinstance(placement, Replicate) and placement.dim != 0:
        return None
    return checkpoint.extent(name)


def _read_ahead(checkpoint: Checkpoint, blocks: list[Block]) -> Generator[torch.Tensor, None, None]:
    """The rows of every block, the next one being read while the caller works on this one."""
    with ThreadPoolExecutor(max_workers=1) as reader:
        ahead = [reader.submit(checkpoint.read, *block) for block in blocks[:1]]
        for following in [*blocks[1:], None]:
            rows = ahead.pop().result()
            if following is not None:
                ahead.append(reader.submit(checkpoint.read, *following))
            yield rows


def _parts(
    placement: Placement, start: int, stop: int
) -> Iterator[tuple[int | None, tuple[int, int], slice | None]]:
    """(rank, the rows, the columns) of what each archive takes of rows start .. stop - 1."""
    if isinstance(placement, Replicate):
        yield None, (start, stop), None
        return
    for rank, (first, last) in enumerate(placement.ranges):
        if placement.dim == 1 and first < last:
            yield rank, (start, stop), slice(first, last)
        low, high = max(first, start), min(last, stop)
        if placement.dim == 0 and low < high:
            yield rank, (low, high), None


def _copy(writer: ArchiveWriter, key: str, source: FileExtent, first: int, last: int) -> None:
    """Append bytes first .. last - 1 of the parameter at `source`."""
    fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while first < last:
            count = writer.copy(key, fd, source.offset + first, last - first)
            if count == 0:
                raise cut_short(source.path, source.offset + last)
            first += count
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
        for some in rows.split(max(1, len(self.out) // math.prod(rows.shape[1:]))):
            out = self.out[: some.numel()].view(some.shape)
            if out.dtype == some.dtype:
                out.copy_(some)
            else:  # by way of f32, which has all their values: bf16 to f16 at once is scalar code
                out.copy_(self.wide[: some.numel()].view(some.shape).copy_(some))
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
