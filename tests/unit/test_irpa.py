"""artifacts/irpa.py: what is written is read, by us and by IREE; damage is refused by name."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from iree import runtime as rt
from shark_llm.artifacts import irpa
from shark_llm.artifacts.irpa import (
    ArchiveReader,
    ArchiveWriter,
    Entry,
    Identity,
    archive_size,
    check_archive,
)
from shark_llm.errors import ArtifactError, CapacityError

IDENTITY = Identity(model="ab" * 32, tp=2, rank=1, dtype="f32")
ENTRIES = [
    Entry(name="a", dtype="f32", shape=(3, 5)),
    Entry(name="splat", dtype="bf16", shape=(7, 3), splat=b"\x00\x3c"),
    Entry(name="empty", dtype="f32", shape=(0, 4)),
    Entry(name="é.rank1", dtype="i8", shape=(200,)),
]
A = np.arange(15, dtype=np.float32).reshape(3, 5)
B = np.arange(200, dtype=np.int8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.rank1.irpa"
    with ArchiveWriter(path, IDENTITY, ENTRIES) as archive:  # pieces of any size, in any order
        archive.write("é.rank1", B[77:].data, at=77)
        archive.write("a", A[:1].data, at=0)
        archive.write("é.rank1", B[:77].data, at=0)
        archive.write("a", A[1:].tobytes(), at=20)
        archive.write("empty", b"", at=0)
    return path


def test_what_was_written_is_read(path: Path) -> None:
    archive = ArchiveReader(path)
    assert archive.identity == IDENTITY
    assert list(archive.entries) == [entry.name for entry in ENTRIES]
    np.testing.assert_array_equal(archive.read("a"), A)
    np.testing.assert_array_equal(archive.read("é.rank1"), B)
    np.testing.assert_array_equal(archive.read("splat"), np.full((7, 3), 0x3C00, np.uint16))
    assert archive.read("empty").shape == (0, 4)
    assert not archive.read("a").flags.writeable


def test_layout_is_aligned_and_its_size_known_beforehand(path: Path) -> None:
    size = path.stat().st_size
    assert size == archive_size(ENTRIES, IDENTITY)
    assert size % 4096 == 0
    archive = ArchiveReader(path)
    assert all(e.offset % 64 == 0 for e in archive.entries.values() if e.splat is None)


def test_iree_reads_the_same_entries(path: Path) -> None:
    index = rt.ParameterIndex()
    index.load(str(path))
    found = dict(index.items())
    assert list(found) == [entry.name for entry in ENTRIES], "the identity is no parameter"
    assert [found[entry.name].length for entry in ENTRIES] == [e.nbytes for e in ENTRIES]
    assert found["splat"].is_splat
    assert bytes(found["a"].file_view[:60]) == A.tobytes()


def test_we_read_what_iree_writes(tmp_path: Path) -> None:
    """An archive of another tool opens as bytes, and has no identity."""
    index = rt.ParameterIndex()
    index.add_splat("s", b"\x01\x02\x03\x04", 64)
    index.add_buffer("d", A)
    index.create_archive_file(str(tmp_path / "x.irpa"))
    archive = ArchiveReader(tmp_path / "x.irpa")
    assert archive.identity is None
    assert archive.read("d").tobytes() == A.tobytes()
    assert archive.read("s").tobytes() == b"\x01\x02\x03\x04" * 16
    with pytest.raises(ArtifactError, match=r"x\.irpa does not say which model, tp and rank"):
        check_archive(tmp_path / "x.irpa", IDENTITY)


def test_writing_too_much_or_too_little_is_our_bug(tmp_path: Path) -> None:
    with (
        ArchiveWriter(tmp_path / "x", IDENTITY, []) as archive,
        pytest.raises(KeyError),
    ):
        archive.write("a", b"1", at=0)
    with pytest.raises(AssertionError, match="more bytes than declared"):
        _write_a(tmp_path / "x", b"1" * 61)
    with pytest.raises(AssertionError, match="without all their bytes"):
        _write_a(tmp_path / "x", b"1" * 59)


def _write_a(path: Path, data: bytes) -> None:
    with ArchiveWriter(path, IDENTITY, ENTRIES[:1]) as archive:
        archive.write("a", data, at=0)


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path: Path) -> None:
    """F06: needed and free are both named."""
    huge = [Entry(name="a", dtype="f32", shape=(1 << 50,))]
    with pytest.raises(CapacityError, match=r"x needs \d+ bytes and .* has \d+ free"):
        ArchiveWriter(tmp_path / "x", IDENTITY, huge)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"rank": 0}, "tp=2, rank=0"),
        ({"rank": None, "tp": 1}, "tp=1, shared"),
        ({"model": "cd" * 32}, "model cdcdcdcdcdcd"),
        ({"dtype": "bf16"}, "bf16"),
    ],
)
def test_an_archive_of_elsewhere_is_refused_naming_both(
    path: Path, change: dict[str, object], found: str
) -> None:
    """B09: swapped ranks, another tp, another model of equal shapes, another dtype."""
    fields = {"model": IDENTITY.model, "tp": 2, "rank": 1, "dtype": "f32"} | change
    with pytest.raises(ArtifactError, match=rf"model\.rank1\.irpa.*wanted .*{found}.*; the file"):
        check_archive(path, Identity(**fields))  # type: ignore[arg-type]
    assert check_archive(path, IDENTITY).identity == IDENTITY


def test_missing_emptied_and_foreign_files_are_refused_by_name(path: Path) -> None:
    """F09: deleted, emptied, or no archive at all."""
    for content, fault in [
        (b"", "0 bytes are too few"),
        (b"GGUF" + b"\0" * 5000, "starts with b'GGUF'"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=rf"model\.rank1\.irpa.*{fault}"):
            ArchiveReader(path)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"model\.rank1\.irpa \(No such file"):
        ArchiveReader(path)


def test_a_cut_file_is_refused_at_every_length(path: Path) -> None:
    """F09: cut. Only the padding after the last byte can go without loss."""
    content = path.read_bytes()
    last = ArchiveReader(path).entries["é.rank1"].offset + 200
    for length in [*range(0, last, 7), last - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match=r"model\.rank1\.irpa"):
            ArchiveReader(path)


def test_damage_anywhere_in_the_tables_never_escapes_as_another_error(path: Path) -> None:
    content = path.read_bytes()
    refused = 0
    for at in range(ArchiveReader(path).entries["a"].offset):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            sum(entry.nbytes for entry in ArchiveReader(path).entries.values())
        except ArtifactError:
            refused += 1
    assert refused > 100, "most fields are checked"


def test_entry_sizes_that_contradict_the_shape_are_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"[3,5]", b"[3,6]"))
    with pytest.raises(ArtifactError, match=r"entry 'a' has 60 bytes.*needs 72"):
        ArchiveReader(path)


def test_a_later_format_version_is_refused(path: Path) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, 4, 1)
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="version 1"):
        ArchiveReader(path)


def test_a_write_larger_than_one_call_takes_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux writes at most 2 GiB a call and says how much it wrote."""
    pwrite = irpa.os.pwrite
    monkeypatch.setattr(irpa.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:13], at))
    _write_a(tmp_path / "x", A.tobytes())
    np.testing.assert_array_equal(ArchiveReader(tmp_path / "x").read("a"), A)
