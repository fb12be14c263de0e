"""Parameter archives (.irpa): written as a stream, read by mapping.

Layout, all little-endian, offsets from the start of the file (iree/schemas/parameter_archive.h):

    header     88 bytes    "IRPA", version 0.0, sizes, and (offset, length) of the three segments
    entries    16-aligned  one record per entry: skip 60, data 76 or splat 85 bytes, padded to 16
    metadata               names and the entries' own metadata, without alignment
    storage    64-aligned  the bytes of data entries, each 64-aligned; the file is padded to 4096

Two things are ours, and IREE passes over both: each entry's metadata is JSON with dtype and shape,
and entry 0, of the type "skip", holds the `Identity` of the archive. A splat entry has a length and
a pattern but no bytes, which makes archives of kilobytes for models of any size.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shark_llm.artifacts.manifest import precision
from shark_llm.errors import ArtifactError, CapacityError

DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i32": 4, "i64": 8}
# numpy has no bfloat16: its bits are read as u16.
_NUMPY = {
    "f32": "<f4",
    "f16": "<f2",
    "bf16": "<u2",
    "i8": "i1",
    "u8": "u1",
    "i32": "<i4",
    "i64": "<i8",
}

_HEADER = struct.Struct("<4sHHQQQQ6Q")
_ENTRY = struct.Struct("<QIQQQQQQ")  # size, type, flags, name ref, metadata ref, alignment
_DATA = struct.Struct("<QQ")  # offset in the storage segment, length
_SPLAT = struct.Struct("<Q16sB")  # length, pattern, pattern length
_SKIP_TYPE, _SPLAT_TYPE, _DATA_TYPE = 0, 1, 2
_ENTRY_ALIGNMENT, _DATA_ALIGNMENT, _FILE_ALIGNMENT = 16, 64, 4096
_IDENTITY_NAME = "shark.identity"


def archive_name(rank: int | None) -> str:
    """The file name of a rank's archive; None: of the archive that all ranks share."""
    return "model.irpa" if rank is None else f"model.rank{rank}.irpa"


def archive_ranks(tp: int) -> tuple[int | None, ...]:
    """The archives of a bundle in order: None is model.irpa, then each rank; at tp 1 only None."""
    return (None,) if tp == 1 else (None, *range(tp))


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What an archive belongs to. `model`: the checkpoint's digest; `rank` None: shared by all."""

    model: str
    tp: int
    rank: int | None
    dtype: str
    weights_dtype: str | None = None
    """Of matrices; None: as `dtype`."""

    def __str__(self) -> str:
        rank = "shared" if self.rank is None else f"rank={self.rank}"
        of_dtype = precision(self.dtype, self.weights_dtype)
        return f"model {self.model[:12]}, tp={self.tp}, {rank}, {of_dtype}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter of an archive. `splat`: one element's bytes, repeated; no storage in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    splat: bytes | None = None
    offset: int = 0
    """Of its first byte in the file; filled in by the writer and the reader."""

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def archive_size(entries: Sequence[Entry], identity: Identity) -> int:
    """Bytes of the file that `ArchiveWriter` would write."""
    return _lay_out(entries, identity).size


class ArchiveWriter:
    """Writes an archive whose entries are known beforehand and whose bytes arrive in pieces.

    Pieces may arrive in any order, and from several threads; each byte comes once. Nothing is
    buffered.

        with ArchiveWriter(path, identity, entries) as archive:
            archive.write("token_embd.weight", chunk, at=0)

    Leaving the block normally asserts that every entry is complete. The file appears under its
    name at once: whoever needs atomicity writes into a directory that `publish` stages.
    """

    def __init__(self, path: Path, identity: Identity, entries: Sequence[Entry]) -> None:
        """Create `path` with its full length. Raises CapacityError when the disk is too full."""
        layout = _lay_out(entries, identity)
        self.path = path
        self.size = layout.size
        self._entries = {entry.name: entry for entry in layout.entries}
        assert len(self._entries) == len(entries), "entry names must be unique"
        self._written = {entry.name: 0 for entry in layout.entries if entry.splat is None}
        self._lock = threading.Lock()
        free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
        if self.size > free:
            raise CapacityError(
                f"{path} needs {self.size} bytes and {path.parent} has {free} free: "
                "free some space or choose another directory"
            )
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Not truncated to its length: to fill a hole takes a third longer on ext4.
            os.posix_fallocate(self._fd, 0, self.size)
            _write_all(self._fd, memoryview(layout.head), 0)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, name: str, data: memoryview | bytes, at: int) -> None:
        """Write `data` (C-contiguous) to the entry `name`, from its byte `at` on."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        entry = self._entries[name]
        assert 0 <= at <= entry.nbytes - view.nbytes, f"{name}: more bytes than declared"
        _write_all(self._fd, view, entry.offset + at)
        with self._lock:
            self._written[name] += view.nbytes
            assert self._written[name] <= entry.nbytes, f"{name}: bytes came twice"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        if exc_type is None:
            short = [n for n, done in self._written.items() if done != self._entries[n].nbytes]
            assert not short, f"{self.path}: entries without all their bytes: {short[:3]}"


class ArchiveReader:
    """An archive's table of contents, with its arrays mapped on demand.

    `identity` is None for an archive that another tool made; its entries are then u8 vectors unless
    their metadata says more.
    """

    def __init__(self, path: Path) -> None:
        """Read header and entry table, and check every bound against the size of the file.

        Raises ArtifactError, naming the file, when it is missing or is not a sound archive.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                self.identity, entries = self._parse(file.fileno())
        except OSError as error:
            raise ArtifactError(
                f"cannot read the parameter archive {path} ({error.strerror}): "
                "check the path, or build the bundle again"
            ) from error
        self.entries = MappingProxyType({entry.name: entry for entry in entries})

    def read(self, name: str) -> npt.NDArray[Any]:
        """The array of entry `name`: read-only, mapped, bf16 as u16 bits; a splat is broadcast."""
        entry = self.entries[name]
        dtype = np.dtype(_NUMPY[entry.dtype])
        if entry.splat is not None:
            pattern = np.frombuffer(entry.splat, dtype)
            if len(pattern) > 1:  # of another tool, whose dtype we do not know
                return np.resize(pattern, entry.shape)
            return np.broadcast_to(pattern[0], entry.shape)
        if entry.nbytes == 0:
            return np.empty(entry.shape, dtype)
        return np.memmap(self.path, dtype, "r", entry.offset, entry.shape)

    def _parse(self, fd: int) -> tuple[Identity | None, list[Entry]]:
        head = os.pread(fd, _HEADER.size, 0)
        if len(head) < _HEADER.size:
            raise self._bad(f"{self.size} bytes are too few for a header")
        magic, major, _, header_size, next_header, _, count, *segments = _HEADER.unpack(head)
        if magic != b"IRPA":
            raise self._bad(f"it starts with {magic!r}, not b'IRPA'")
        if major != 0 or header_size != _HEADER.size or next_header != 0:
            raise self._bad(f"version {major} or a chain of archives is not supported")
        table_at, table_size, text_at, text_size, storage_at, storage_size = segments
        for what, at, size in (
            ("entry table", table_at, table_size),
            ("metadata", text_at, text_size),
            ("storage", storage_at, storage_size),
        ):
            if at + size > self.size:
                raise self._bad(
                    f"its {what} ends at byte {at + size}, but the file has {self.size} bytes: "
                    "it was cut"
                )
        table, text = os.pread(fd, table_size, table_at), os.pread(fd, text_size, text_at)
        identity = None
        entries = []
        for kind, name, metadata, body in self._records(table, text, count):
            if kind == _SKIP_TYPE:
                if name == _IDENTITY_NAME:
                    identity = self._identity(metadata)
                continue
            entry, length = self._entry(kind, name, metadata, body, storage_at, storage_size)
            if entry.nbytes != length:
                raise self._bad(
                    f"entry {name!r} has {length} bytes, its shape {entry.shape} needs "
                    f"{entry.nbytes}"
                )
            entries.append(entry)
        return identity, entries

    def _entry(
        self, kind: int, name: str, metadata: bytes, body: bytes, storage_at: int, storage_size: int
    ) -> tuple[Entry, int]:
        """A data or splat entry, and how many bytes the archive says that it has."""
        if kind == _DATA_TYPE:
            offset, length = _DATA.unpack_from(body)
            if offset + length > storage_size:
                raise self._bad(f"entry {name!r} reaches beyond the storage segment")
            dtype, shape = self._type(metadata, length)
            return Entry(name=name, dtype=dtype, shape=shape, offset=storage_at + offset), length
        length, pattern, pattern_length = _SPLAT.unpack_from(body)
        if pattern_length not in (1, 2, 4, 8, 16) or length % pattern_length:
            raise self._bad(f"splat {name!r} repeats {pattern_length} bytes over {length}")
        dtype, shape = self._type(metadata, length)
        return Entry(name=name, dtype=dtype, shape=shape, splat=pattern[:pattern_length]), length

    def _records(
        self, table: bytes, text: bytes, count: int
    ) -> Iterator[tuple[int, str, bytes, bytes]]:
        """(type, name, metadata, what follows the common part) of each record."""
        body_size = {_SKIP_TYPE: 0, _DATA_TYPE: _DATA.size, _SPLAT_TYPE: _SPLAT.size}
        at = 0
        for index in range(count):
            if at + _ENTRY.size > len(table):
                raise self._bad(f"the entry table ends within entry {index} of {count}")
            size, kind, _, name_at, name_size, meta_at, meta_size, _ = _ENTRY.unpack_from(table, at)
            if kind not in body_size:
                raise self._bad(f"entry {index} has the unknown type {kind}")
            if size < _ENTRY.size + body_size[kind] or at + size > len(table):
                raise self._bad(f"entry {index} has an impossible size of {size} bytes")
            if max(name_at + name_size, meta_at + meta_size) > len(text):
                raise self._bad(f"the name or metadata of entry {index} lies outside the file")
            try:
                name = text[name_at : name_at + name_size].decode()
            except UnicodeDecodeError as error:
                raise self._bad(f"the name of entry {index} is not text") from error
            yield (
                kind,
                name,
                text[meta_at : meta_at + meta_size],
                table[at + _ENTRY.size : at + size],
            )
            at += _align(size, _ENTRY_ALIGNMENT)

    def _identity(self, metadata: bytes) -> Identity:
        try:
            return Identity(**json.loads(metadata))
        except (ValueError, TypeError) as error:
            raise self._bad("its identity is not readable") from error

    def _type(self, metadata: bytes, length: int) -> tuple[str, tuple[int, ...]]:
        """dtype and shape from an entry's metadata; what other tools write is taken as bytes."""
        try:
            fields = json.loads(metadata)
            dtype, shape = fields["dtype"], tuple(fields["shape"])
        except (ValueError, TypeError, KeyError):
            return "u8", (length,)
        if dtype not in DTYPE_BYTES or not all(isinstance(d, int) and d >= 0 for d in shape):
            raise self._bad(f"an entry has dtype {dtype!r} and shape {shape!r}")
        return dtype, shape

    def _bad(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"{self.path} is not a sound parameter archive: {what}; copy it again or rebuild it"
        )


def check_archive(path: Path, expected: Identity) -> ArchiveReader:
    """Open `path` and compare its identity. Raises ArtifactError with what was wanted and found."""
    archive = ArchiveReader(path)
    if archive.identity is None:
        raise ArtifactError(
            f"{path} does not say which model, tp and rank it belongs to (wanted: {expected}): "
            "use the archives that shark-compile wrote"
        )
    if archive.identity != expected:
        raise ArtifactError(
            f"{path} belongs elsewhere: wanted {expected}; the file holds {archive.identity}; "
            "use the archives of one and the same bundle"
        )
    return archive


@dataclass(frozen=True, kw_only=True)
class _Layout:
    entries: list[Entry]
    head: bytes  # everything before the storage segment
    size: int


def _lay_out(entries: Sequence[Entry], identity: Identity) -> _Layout:
    text = bytearray()
    table = bytearray()
    starts: list[int] = []  # of each entry, in the storage segment
    storage = 0  # bytes of the storage segment so far

    def add(kind: int, name: str, metadata: dict[str, Any], body: bytes) -> None:
        encoded = name.encode(), json.dumps(metadata, separators=(",", ":")).encode()
        refs = len(text), len(encoded[0]), len(text) + len(encoded[0]), len(encoded[1])
        text.extend(b"".join(encoded))
        alignment = _DATA_ALIGNMENT if kind == _DATA_TYPE else 0
        table.extend(b"\0" * (_align(len(table), _ENTRY_ALIGNMENT) - len(table)))
        table.extend(_ENTRY.pack(_ENTRY.size + len(body), kind, 0, *refs, alignment) + body)

    add(_SKIP_TYPE, _IDENTITY_NAME, asdict(identity), b"")
    for entry in entries:
        metadata = {"dtype": entry.dtype, "shape": entry.shape}
        if entry.splat is not None:
            body = _SPLAT.pack(entry.nbytes, entry.splat, len(entry.splat))
            add(_SPLAT_TYPE, entry.name, metadata, body)
            starts.append(0)
        else:
            storage = _align(storage, _DATA_ALIGNMENT)
            add(_DATA_TYPE, entry.name, metadata, _DATA.pack(storage, entry.nbytes))
            starts.append(storage)
            storage += entry.nbytes

    table_at = _align(_HEADER.size, _ENTRY_ALIGNMENT)
    text_at = table_at + len(table)
    storage_at = _align(text_at + len(text), _DATA_ALIGNMENT)
    segments = table_at, len(table), text_at, len(text), storage_at, storage
    header = _HEADER.pack(b"IRPA", 0, 0, _HEADER.size, 0, 0, len(entries) + 1, *segments)
    head = header.ljust(table_at, b"\0") + bytes(table) + bytes(text)
    return _Layout(
        entries=[
            entry if entry.splat is not None else replace(entry, offset=storage_at + start)
            for entry, start in zip(entries, starts, strict=True)
        ],
        head=head,
        size=_align(storage_at + storage, _FILE_ALIGNMENT),
    )


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    """pwrite until all is written: one call writes at most 2 GiB."""
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _align(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment
