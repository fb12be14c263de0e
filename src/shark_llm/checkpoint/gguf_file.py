"""One .gguf file: metadata and where each tensor lies, checked against the size of the file.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, u32 version, u64 tensor
count, u64 metadata count; the metadata (key, type, value); the tensors (name, dimensions with the
innermost first, type, offset into the data); padding to the alignment; the data.

`gguf.GGUFReader` makes several numpy views of each of the 10^5 strings of a vocabulary, which takes
seconds to minutes, and maps the file; so the header is parsed here. Block formats and their
dequantization are the library's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from shark_llm.errors import CheckpointError

MAGIC = b"GGUF"
# GGUFValueType -> struct format of its scalar; 8 is string, 9 is array
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies: `offset` in the file, `shape` with the outermost first."""

    offset: int
    shape: tuple[int, ...]
    kind: GGMLQuantizationType

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the innermost dimension."""
        block_size, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block_size * block_bytes

    @property
    def num_rows(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read all of the file but its data. Raises CheckpointError with found and expected sizes."""
    size = path.stat().st_size
    with path.open("rb", buffering=1 << 20) as file:
        magic = file.read(4)
        if magic != MAGIC:
            if magic == b"vers":
                raise CheckpointError(f"{path}: is a Git LFS pointer: run `git lfs pull`")
            raise CheckpointError(
                f"{path}: begins with {magic!r}, expected {MAGIC!r}: no GGUF file"
            )
        reader = _Reader(path, file, size)
        version = reader.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{path}: GGUF version {version}, supported are 2 and 3 (little-endian): convert it"
            )
        num_tensors, num_pairs = reader.scalar("Q"), reader.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = reader.string()
            if key in metadata:
                raise CheckpointError(f"{path}: metadata key {key} stands twice: convert it again")
            metadata[key] = reader.value(reader.scalar("I"))
        entries = [_read_entry(path, reader) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{path}: general.alignment = {alignment!r}: convert it again")
        data_start = -(-file.tell() // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = data_start
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        tensor = GgufTensor(offset=data_start + offset, shape=shape, kind=kind)
        if name in tensors or tensor.offset < end:
            fault = "stands twice" if name in tensors else "overlaps the one before it"
            raise CheckpointError(f"{path}: tensor {name} {fault}: download it again")
        end = tensor.offset + tensor.num_rows * tensor.row_bytes
        tensors[name] = tensor
    if not end <= size <= -(-end // alignment) * alignment:
        fault = "cut off" if size < end else "followed by foreign bytes"
        raise CheckpointError(
            f"{path}: has {size} bytes, expected {end}: the file is {fault}; download it again"
        )
    return GgufFile(metadata=metadata, tensors=tensors)


def _read_entry(
    path: Path, reader: _Reader
) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name, num_dims = reader.string(), reader.scalar("I")
    if not 1 <= num_dims <= 4:
        raise CheckpointError(f"{path}: tensor {name}: {num_dims} dimensions, expected 1 to 4")
    shape = tuple(reversed([reader.scalar("Q") for _ in range(num_dims)]))
    number, offset = reader.scalar("I"), reader.scalar("Q")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: tensor {name}: type {number} is unknown: requantize it, for instance to Q8_0"
        ) from error
    block_size, _ = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block_size:
        raise CheckpointError(
            f"{path}: tensor {name}: shape {list(shape)} is no whole number of {kind.name} blocks"
        )
    return name, shape, kind, offset


class _Reader:
    """Reads the parts of the header; each read is checked against the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._scalars: dict[str, tuple[int, Callable[[bytes], tuple[Any, ...]]]] = {
            code: (struct.calcsize(f"<{code}"), struct.Struct(f"<{code}").unpack)
            for code in set(SCALARS.values())
        }

    def _bytes(self, count: int) -> bytes:
        if count > self._size:  # checked first: a wrong length must not allocate
            self._cut_off(count)
        data = self._file.read(count)
        if len(data) < count:
            self._cut_off(count)
        return data

    def _cut_off(self, count: int) -> None:
        raise CheckpointError(
            f"{self._path}: has {self._size} bytes and ends in its header, where {count} more are"
            " expected: the file is cut off or damaged; download it again"
        )

    def scalar(self, code: str) -> Any:
        size, unpack = self._scalars[code]
        return unpack(self._bytes(size))[0]

    def string(self) -> str:
        data = self._bytes(self.scalar("Q"))
        # Some vocabularies hold tokens that are no whole UTF-8; they can never match text either.
        return data.decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise CheckpointError(
                f"{self._path}: metadata of unknown type {kind}: convert it again"
            )
        element, count = self.scalar("I"), self.scalar("Q")
        if element in SCALARS:
            code = SCALARS[element]
            data = self._bytes(count * self._scalars[code][0])
            return list(struct.unpack(f"<{count}{code}", data))
        if count > self._size:
            self._cut_off(count)
        return [self.value(element) for _ in range(count)]
