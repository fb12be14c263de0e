"""The stage cache: what builds into other directories take from it, and what it never gives."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import tiny
from build_harness import FakeCompileSide, ListReporter, settings
from shark_llm.artifacts import manifest, stage_cache
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.artifacts.stage_cache import cache_root
from shark_llm.build import BuildResult, build, plan_build
from shark_llm.checkpoint import known_digests
from shark_llm.errors import CapacityError


class Builds:
    """Builds into new directories, one after the other, with one cache; a first one is done."""

    def __init__(self, root: Path, side: FakeCompileSide) -> None:
        self.root, self.side = root, side
        self.model = tiny.write_tiny(root / "t0")
        self.cache = root / "cache"
        self.reporter = ListReporter()
        self.count = 0
        self.first = self.build()

    def build(self, model: Path | None = None, **changes: Any) -> BuildResult:
        self.side.exports = self.side.compiles = self.side.goldens = 0
        self.reporter = ListReporter()
        self.count += 1
        fields = {"cache_dir": self.cache} | changes
        out_dir = fields.pop("out_dir", self.root / f"bundle{self.count}")
        result = build(settings(model or self.model, out_dir, **fields), self.reporter)
        assert open_bundle(out_dir, verify="digests").manifest == result.manifest
        return result

    def notes(self) -> list[str]:
        """How the stages that could be skipped were done."""
        return [self.reporter.stage_note(name) for name in ("shard", "export", "compile")]

    def entry_file(self, kind: str, name: str) -> Path:
        (path,) = (self.cache / kind).glob(f"*/{name}")
        return path


@pytest.fixture
def builds(tmp_path: Path, compile_side: FakeCompileSide) -> Builds:
    return Builds(tmp_path, compile_side)


FROM_CACHE = "reused from the cache"


def test_the_same_elsewhere_takes_all_from_the_cache(builds: Builds) -> None:
    """Checked again all the same; and the archive is one file on the disk, not two."""
    second = builds.build()
    assert builds.notes() == [FROM_CACHE] * 3
    assert (builds.side.exports, builds.side.compiles, builds.side.goldens) == (0, 0, 1)
    assert second.manifest == builds.first.manifest
    assert os.path.samefile(second.path / "model.irpa", builds.first.path / "model.irpa")


def test_a_new_target_reuses_the_archives(builds: Builds) -> None:
    builds.build(target="gfx942")
    assert builds.notes() == [FROM_CACHE, "", ""]
    assert len(list((builds.cache / "modules").iterdir())) == 2
    assert len(list((builds.cache / "archives").iterdir())) == 1


def test_a_fine_tune_of_the_same_shape_reuses_the_module(builds: Builds) -> None:
    tuned = tiny.write_tiny(builds.root / "tuned", seed=7)
    builds.build(tuned)
    assert builds.notes() == ["", FROM_CACHE, FROM_CACHE]


def test_what_is_linked_needs_no_room(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for the module alone is enough when the archives are there."""
    usage = stage_cache.shutil.disk_usage(builds.root)
    room = 67543040 - 434176
    monkeypatch.setattr(stage_cache.shutil, "disk_usage", lambda path: usage._replace(free=room))
    builds.build(target="gfx942")
    assert builds.notes() == [FROM_CACHE, "", ""]
    with pytest.raises(CapacityError):
        builds.build(target="gfx942", cache_policy="off")


def test_the_old_bundle_may_be_gone(builds: Builds) -> None:
    """What makes it more than a look at the old bundle."""
    for path in builds.first.path.iterdir():
        path.unlink()
    builds.build()
    assert builds.notes() == [FROM_CACHE] * 3


@pytest.mark.parametrize(
    ("kind", "name", "stages"),
    [("archives", "model.irpa", ["", FROM_CACHE]), ("modules", "model.vmfb", [FROM_CACHE, ""])],
)
@pytest.mark.parametrize("damage", ["one bit", "cut", "gone", "entry", "renamed"])
def test_a_damaged_entry_is_never_used(
    builds: Builds, kind: str, name: str, stages: list[str], damage: str
) -> None:
    """It is removed with a note, its stage runs, and what that makes takes its place."""
    path = builds.entry_file(kind, name)
    content = path.read_bytes()
    path.unlink()  # a link: the bundle keeps its own
    if damage == "one bit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "entry":
        path.write_bytes(content)
        (path.parent / "entry.json").write_text("{}")
    elif damage == "renamed":  # whole, but of something else
        path.write_bytes(content)
        entry = path.parent / "entry.json"
        entry.write_text(entry.read_text().replace(path.parent.name, "0" * 64))
    builds.build()
    shard, _, compiled = builds.notes()
    assert [shard, compiled] == stages
    assert f"the cached {kind} {path.parent} are not used" in builds.reporter.notes[0]
    builds.build()
    assert builds.notes() == [FROM_CACHE] * 3


# --- flags ---------------------------------------------------------------------------------------


def test_off_neither_uses_nor_keeps(builds: Builds) -> None:
    """Nor does the bundle in the same place count."""
    builds.build(cache_policy="off", target="gfx942")
    assert builds.notes() == ["", "", ""]
    assert len(list((builds.cache / "modules").iterdir())) == 1
    again = builds.build(cache_policy="off", out_dir=builds.first.path)
    assert not again.reused
    assert builds.notes() == ["", "", ""]


def test_redo_makes_anew_and_keeps(builds: Builds) -> None:
    before = builds.entry_file("archives", "model.irpa").stat().st_ino
    assert not builds.build(cache_policy="redo", out_dir=builds.first.path).reused
    assert builds.notes() == ["", "", ""]
    assert builds.entry_file("archives", "model.irpa").stat().st_ino != before
    builds.build()
    assert builds.notes() == [FROM_CACHE] * 3


def test_readonly_uses_and_keeps_nothing(builds: Builds) -> None:
    builds.build(cache_policy="readonly", target="gfx942")
    assert builds.notes() == [FROM_CACHE, "", ""]
    assert len(list((builds.cache / "modules").iterdir())) == 1


def test_ensure_export_exports_again(builds: Builds) -> None:
    """The same MLIR comes out, which needs no second compilation."""
    result = builds.build(ensure=("export",), out_dir=builds.first.path)
    assert not result.reused
    assert builds.notes() == ["reused", "", "reused"]


def test_ensure_compile_compiles_again(builds: Builds) -> None:
    builds.build(ensure=("compile",))
    assert builds.notes() == [FROM_CACHE, "", ""]
    assert builds.side.compiles == 1


def test_the_dry_run_knows_the_cache(builds: Builds) -> None:
    elsewhere = settings(builds.model, builds.root / "new", cache_dir=builds.cache, target="gfx942")
    reuse = plan_build(elsewhere, ListReporter()).reuse
    assert str(reuse) == "archives (from the cache) can be reused"
    assert not (builds.root / "new").exists()


# --- faults of the cache are not the build's -----------------------------------------------------


def test_a_cache_that_cannot_be_written_is_a_note(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F06: nothing half written stays, and the bundle is there."""

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stage_cache, "link_or_copy", full)
    builds.build(target="gfx942")
    assert builds.reporter.notes == [
        f"t0, f32, tp 1, gfx942: not kept in the cache {builds.cache}: No space left on device"
    ]
    assert not list((builds.cache / "modules").glob(".*"))


def test_on_another_disk_only_what_fits_easily_is_copied(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = stage_cache.shutil.disk_usage(builds.root)
    monkeypatch.setattr(stage_cache.shutil, "disk_usage", lambda path: usage._replace(free=500_000))
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        result = real(self, **options)
        if not self.is_relative_to(builds.cache):
            return result
        fields = list(result)
        fields[2] += 1  # st_dev
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr("shark_llm.artifacts.publish._free_bytes", lambda path: usage.free)
    builds.build(tiny.write_tiny(builds.root / "tuned", seed=7))
    assert "which is on another disk: a copy takes 434176 bytes" in builds.reporter.notes[0]


def test_without_hard_links_files_are_copied(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    second = builds.build()
    assert builds.notes() == [FROM_CACHE] * 3
    assert (second.path / "model.irpa").stat().st_nlink == 1


def test_pruned_between_finding_and_linking(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages run then, the exporter too, which had been skipped."""

    def gone(source: Path, target: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))

    monkeypatch.setattr("shark_llm.reuse.link_or_copy", gone)
    builds.build()
    assert builds.notes() == ["", FROM_CACHE, ""]
    assert builds.side.exports == 1


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A flag, then SHARK_CACHE_DIR, then XDG_CACHE_HOME, then ~/.cache."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SHARK_CACHE_DIR", str(tmp_path / "own"))
    assert cache_root(Path("~/c")) == tmp_path / "home" / "c"
    assert cache_root(None) == tmp_path / "own"
    monkeypatch.delenv("SHARK_CACHE_DIR")
    assert cache_root(None) == tmp_path / "xdg" / "shark"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(None) == tmp_path / "home" / ".cache" / "shark"


# --- --quick-check -------------------------------------------------------------------------------


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The big files that are read to their end from now on."""
    read: list[str] = []
    real = manifest.digest_files

    def digest_files(root: Path, names: Iterable[str], *args: Any) -> dict[str, Any]:
        names = list(names)
        read.extend(Path(name).name for name in names if Path(name).suffix != ".json")
        return real(root, names, *args)

    for module in ("artifacts.bundle", "artifacts.publish", "artifacts.stage_cache"):
        monkeypatch.setattr(f"shark_llm.{module}.digest_files", digest_files)
    monkeypatch.setattr("shark_llm.checkpoint.safetensors.digest_files", digest_files)
    return read


@pytest.fixture
def settled(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> Builds:
    """The checkpoint has been there for an hour, as far as the clock tells."""
    real = time.time
    monkeypatch.setattr(known_digests.time, "time", lambda: real() + 3600)
    builds.build(out_dir=builds.first.path)
    return builds


def test_a_quick_check_reads_no_weights(settled: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's second start takes seconds, whatever the size of the model."""
    read = count_reads(monkeypatch)
    wanted = settings(settled.model, settled.first.path, cache_dir=settled.cache, quick_check=True)
    assert build(wanted, ListReporter()).reused
    assert read == []
    careful = settings(settled.model, settled.first.path, cache_dir=settled.cache)
    assert build(careful, ListReporter()).reused
    assert {"model.safetensors", "model.irpa", "model.vmfb"} <= set(read)


def test_a_quick_check_takes_no_part_unread(settled: Builds) -> None:
    """For another target the archives are taken: only after every byte is compared."""
    path = settled.first.path / "model.irpa"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)  # of the cache too, since it is a link
    settled.build(target="gfx942", out_dir=settled.first.path, quick_check=True)
    assert settled.notes()[0] == ""
    assert any("damaged: model.irpa" in note for note in settled.reporter.notes)
    assert any("cached archives" in note for note in settled.reporter.notes)


def test_a_quick_check_sees_a_cut_file_and_a_changed_checkpoint(settled: Builds) -> None:
    out_dir = settled.first.path
    with (out_dir / "model.vmfb").open("ab") as file:
        file.write(b"x")
    assert not settled.build(out_dir=out_dir, quick_check=True).reused
    old = settled.model / "model.safetensors"
    times = old.stat()
    new = tiny.write_tiny(settled.root / "new", seed=9) / "model.safetensors"
    old.write_bytes(new.read_bytes())
    os.utime(old, ns=(times.st_atime_ns, times.st_mtime_ns))  # ctime tells all the same
    result = settled.build(out_dir=out_dir, quick_check=True)
    assert not result.reused
    assert result.manifest.source.digest != settled.first.manifest.source.digest


def test_a_checkpoint_that_has_just_changed_is_not_remembered(builds: Builds) -> None:
    """Within the same tick of the clock a second change would show the same times."""
    assert not (builds.cache / "sources").exists()
