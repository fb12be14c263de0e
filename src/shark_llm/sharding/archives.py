"""Which archive holds which entries: from config and plan alone, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shark_llm.artifacts.irpa import (
    ArchiveWriter,
    Entry,
    Identity,
    archive_name,
    archive_ranks,
    archive_size,
)
from shark_llm.artifacts.manifest import Placement, Replicate
from shark_llm.errors import UsageError
from shark_llm.model.config import ModelConfig
from shark_llm.sharding.plan import is_quantized, local_parameters, stored_parameters

WEIGHT_DTYPES = ("f32", "f16", "bf16")

# 2**-7 in each dtype: what every element of a dummy archive is. Not zero, so that a benchmark has
# normal numbers to work on; small enough that sums over the widest model stay finite in f16. A
# quantized weight is 1, and its scale 2**-7.
_DUMMY = {"f32": b"\x00\x00\x00\x3c", "f16": b"\x00\x20", "bf16": b"\x00\x3c", "i8": b"\x01"}


def archive_entries(
    config: ModelConfig, plan: Mapping[str, Placement], *, tp: int, dtype: str, dummy: bool = False
) -> dict[int | None, list[Entry]]:
    """The entries of every archive, in the order of `stored_parameters`.

    `dtype` is one of WEIGHT_DTYPES, else UsageError. `dummy` makes them splats.
    """
    if dtype not in WEIGHT_DTYPES:
        raise UsageError(f"no such weight dtype: {dtype!r}; choose from {', '.join(WEIGHT_DTYPES)}")
    entries: dict[int | None, list[Entry]] = {rank: [] for rank in archive_ranks(tp)}
    local = [local_parameters(config, plan, rank, dtype) for rank in range(tp)]
    for name in stored_parameters(config, plan, dtype):
        holders = range(1) if isinstance(plan[name], Replicate) else range(tp)
        for rank in holders:
            if part := local[rank].get(name):
                owner = None if isinstance(plan[name], Replicate) else rank
                splat = _DUMMY[part.dtype] if dummy else None
                entry = Entry(name=part.key, dtype=part.dtype, shape=part.shape, splat=splat)
                entries[owner].append(entry)
    return entries


def archive_sizes(
    config: ModelConfig, plan: Mapping[str, Placement], *, tp: int, dtype: str, dummy: bool = False
) -> dict[str, int]:
    """Bytes of every archive file by name, exactly as they will be written."""
    weights_dtype = "int8" if is_quantized(plan) else None
    identity = Identity(model="0" * 64, tp=tp, rank=None, dtype=dtype, weights_dtype=weights_dtype)
    sizes = {}
    for rank, entries in archive_entries(config, plan, tp=tp, dtype=dtype, dummy=dummy).items():
        sizes[archive_name(rank)] = archive_size(entries, identity_of(identity, rank))
    return sizes


def identity_of(identity: Identity, rank: int | None) -> Identity:
    """The identity of another archive of the same bundle."""
    return replace(identity, rank=rank)


def write_dummy_archives(
    config: ModelConfig, plan: Mapping[str, Placement], *, identity: Identity, out_dir: Path
) -> list[Path]:
    """Archives of splat entries, some kilobytes each: full-size models to compile and benchmark.

    Every weight is 2**-7, so what such a model says means nothing. `identity.rank` is not read.
    """
    paths = []
    entries = archive_entries(config, plan, tp=identity.tp, dtype=identity.dtype, dummy=True)
    for rank, of_rank in entries.items():
        path = out_dir / archive_name(rank)
        with ArchiveWriter(path, identity_of(identity, rank), of_rank):
            pass  # the header is the whole archive
        paths.append(path)
    return paths
