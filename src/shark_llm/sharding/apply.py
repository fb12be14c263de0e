"""Cut a checkpoint into the archives of a plan in one pass and little memory; and the inverse.

A thread reads the next block of rows while this one is cast, cut and written:

    Checkpoint.read -> rows of a parameter, <= 8 MiB -> cast -> each rank's part -> its archive
                                                     or quantized, and the same with its scales
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shark_llm.artifacts.irpa import ArchiveReader, ArchiveWriter, Identity, archive_name
from shark_llm.artifacts.manifest import Placement, Replicate
from shark_llm.checkpoint.source import Checkpoint
from shark_llm.errors import CheckpointError
from shark_llm.sharding.archives import archive_entries, identity_of
from shark_llm.sharding.plan import parameter_key, parameter_shapes, scale_name
from shark_llm.sharding.quantize import quantize

# Below the 32 MiB from which malloc always maps anew, so that memory can be reused between blocks:
# reading into fresh mappings took three times as long as into a kept buffer.
BLOCK_BYTES = 8 << 20

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
    total = sum(math.prod(i.shape) * i.dtype.itemsize for i in checkpoint.parameters.values())
    done = 0
    with ExitStack() as stack:
        stack.enter_context(_one_torch_thread())
        writers = {
            rank: stack.enter_context(
                ArchiveWriter(out_dir / archive_name(rank), identity_of(identity, rank), of_rank)
            )
            for rank, of_rank in entries.items()
        }
        for (name, start, _), block in _read_ahead(checkpoint, blocks):
            for stored, rows in _stored(name, block, plan, dtype):
                placement = plan[stored]
                if isinstance(placement, Replicate):
                    writers[None].write(stored, _bytes(rows))
                    continue
                for rank, part in _parts(rows, start, placement.dim, placement.ranges):
                    writers[rank].write(parameter_key(stored, placement, rank), _bytes(part))
            done += block.nbytes
            if progress is not None:
                progress(done, total)
    return [writer.path for writer in writers.values()]


def _stored(
    name: str, rows: torch.Tensor, plan: Mapping[str, Placement], dtype: torch.dtype
) -> list[tuple[str, torch.Tensor]]:
    """What is stored of some rows of a parameter, by name: themselves, or quantized and scales.

    Scales are of whole rows, whoever will hold which columns.
    """
    if scale_name(name) not in plan:
        return [(name, _cast(name, rows, dtype))]
    if not rows.isfinite().all():
        raise CheckpointError(
            f"{name} has values that are not finite, which int8 cannot hold: repair the checkpoint"
        )
    q, scale = quantize(rows)
    return [(name, q), (scale_name(name), scale)]


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


def _read_ahead(
    checkpoint: Checkpoint, blocks: list[Block]
) -> Iterator[tuple[Block, torch.Tensor]]:
    """Every block with its rows, the next one being read while the caller works on this one."""
    with ThreadPoolExecutor(max_workers=1) as reader:
        ahead = reader.submit(checkpoint.read, *blocks[0])
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            rows = ahead.result()
            if following is not None:
                ahead = reader.submit(checkpoint.read, *following)
            yield block, rows


def _parts(
    rows: torch.Tensor, start: int, dim: int, ranges: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its part) of rows start .. start + len(rows) - 1, for the ranks that have one."""
    for rank, (first, last) in enumerate(ranges):
        low, high = (first, last) if dim == 1 else (max(first - start, 0), max(last - start, 0))
        part = rows[:, low:high] if dim == 1 else rows[low:high]
        if part.numel():
            yield rank, part


def _cast(name: str, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if rows.dtype == dtype:
        return rows
    cast = rows.to(dtype)
    low, high = cast.aminmax()  # one cheap pass, and nearly always enough
    if low.isfinite() and high.isfinite():
        return cast
    if (cast.isinf() & rows.isfinite()).any():
        largest = rows[rows.isfinite()].abs().max().item()
        limit = torch.finfo(dtype).max
        raise CheckpointError(
            f"{name} has values up to {largest:g}, {dtype} ends at {limit:g}: use --dtype "
            f"{'bf16' if dtype == torch.float16 else 'f32'}"
        )
    return cast


def _bytes(rows: torch.Tensor) -> memoryview:
    return memoryview(rows.contiguous().view(torch.uint8).numpy().data)
