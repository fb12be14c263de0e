"""One .safetensors file: its header, checked to the byte before anything is believed.

Layout (https://github.com/huggingface/safetensors, "Format"): u64 little-endian length N of the
header, N bytes of JSON {name: {dtype, shape, data_offsets: [begin, end)}}, then the data, to which
the offsets are relative. The ranges cover the data without gap or overlap, to the last byte of the
file.

The library reads such files, but gives no offsets, maps the whole file, and names neither file nor
sizes in its errors; so the header is parsed here.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shark_llm.checkpoint.aux_files import load_json
from shark_llm.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # as the library has it

# fmt: off
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BOOL": 8,
    "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}
# fmt: on


@dataclass(frozen=True, kw_only=True)
class TensorLocation:
    """Where a tensor lies: `offset` from the start of the file, `dtype` as the format spells it."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str


def read_header(path: Path) -> dict[str, TensorLocation]:
    """The tensors of a file. Raises CheckpointError with file name, found and expected sizes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise CheckpointError(
                f"{path}: is a Git LFS pointer of {size} bytes and not the weights:"
                " run `git lfs pull`"
            )
        if len(start) < 8:
            raise CheckpointError(
                f"{path}: has {size} bytes, expected at least 8: the file is cut off;"
                " download it again"
            )
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: has {size} bytes, but its header alone says {header_bytes} (at most"
                f" {MAX_HEADER_BYTES}): cut off, or no safetensors file; download it again"
            )
        header = load_json(path, file.read(header_bytes))
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no JSON object: no safetensors file")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    ranges: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorLocation] = {}
    for name, entry in header.items():
        begin, end, shape, dtype = _check_entry(path, name, entry)
        ranges.append((begin, end, name))
        tensors[name] = TensorLocation(
            path=path, offset=data_start + begin, shape=shape, dtype=dtype
        )
    _check_ranges(path, ranges, size - data_start)
    return tensors


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, int, tuple[int, ...], str]:
    """begin, end (both relative to the data), shape, dtype of one entry of the header."""

    def refuse(what: str) -> NoReturn:
        raise CheckpointError(f"{path}: tensor {name}: {what}; download the file again")

    if not isinstance(entry, dict):
        refuse(f"its header entry is {entry!r}, expected an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        refuse(f"dtype {dtype!r} is none of {', '.join(DTYPE_BITS)}")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        refuse(f"shape {shape!r} is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        refuse(f"data_offsets {offsets!r} are no two positions")
    begin, end = offsets
    expected, odd_bits = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
    if end - begin != expected or odd_bits:
        refuse(
            f"data_offsets {offsets} hold {end - begin} bytes, but {dtype} {shape} takes {expected}"
        )
    return begin, end, tuple(shape), dtype


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_ranges(path: Path, ranges: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The ranges must follow each other without gap or overlap and end with the file."""
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            fault = (
                "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            )
            raise CheckpointError(
                f"{path}: tensor {name}: begins at byte {begin} of the data, expected {position}:"
                f" it {fault}; download the file again"
            )
        position = end
    if position != data_bytes:
        fault = "cut off" if position > data_bytes else "followed by foreign bytes"
        raise CheckpointError(
            f"{path}: the header describes {position} bytes of data, found {data_bytes}:"
            f" the file is {fault}; download it again"
        )
