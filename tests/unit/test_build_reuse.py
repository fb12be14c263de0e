"""What a second build makes again, and what it takes from the bundle that is there."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from build_harness import FakeCompileSide, ListReporter, settings
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.build import BuildResult, build, plan_build
from shark_llm.errors import UsageError


class Place:
    """A checkpoint and where its bundle goes, with a first build done."""

    def __init__(self, root: Path, compile_side: FakeCompileSide) -> None:
        self.root, self.side = root, compile_side
        self.model = tiny.write_tiny(root / "t0")
        self.out_dir, self.dev_dir = root / "bundle", root / "dev"
        self.reporter = ListReporter()
        self.first = self.build()

    def build(self, model: Path | None = None, **changes: Any) -> BuildResult:
        """Build again, and check that what comes of it is sound."""
        self.side.exports = self.side.compiles = self.side.goldens = 0
        self.reporter = ListReporter()
        fields = {"dev_dir": self.dev_dir} | changes
        result = build(settings(model or self.model, self.out_dir, **fields), self.reporter)
        assert open_bundle(self.out_dir, verify="digests").manifest == result.manifest
        return result

    @property
    def work(self) -> tuple[int, int, int]:
        """Exports, compiler runs and golden checks of the last build."""
        return self.side.exports, self.side.compiles, self.side.goldens

    def reused(self, *stages: str) -> list[bool]:
        return [self.reporter.stage_note(stage) == "reused" for stage in stages]


@pytest.fixture
def place(tmp_path: Path, compile_side: FakeCompileSide) -> Place:
    return Place(tmp_path, compile_side)


def test_the_same_again_needs_nothing(place: Place) -> None:
    """No stage after compare, and it says so; also when no dev artifacts are asked for."""
    assert place.work == (1, 1, 1)
    assert place.build().reused
    assert place.work == (0, 0, 0)
    assert place.reporter.notes == [f"{place.out_dir} is what was asked for already: nothing to do"]
    assert place.reporter.started == ["resolve", "plan", "compare"]
    assert place.build(dev_dir=None).reused


def test_another_target_reuses_the_archives(place: Place) -> None:
    """A new target does not reshard; the archive is even the same file."""
    inode = (place.out_dir / "model.irpa").stat().st_ino
    result = place.build(target="gfx942")
    assert place.reused("shard", "export", "compile") == [True, False, False]
    assert (place.out_dir / "model.irpa").stat().st_ino == inode
    assert result.manifest.target.name == "gfx942"
    assert result.manifest.module_key != place.first.manifest.module_key


def test_other_entry_points_reuse_the_archives(place: Place) -> None:
    place.build(batch_sizes_decode=(1, 2))
    assert place.reused("shard", "export", "compile") == [True, False, False]


@pytest.mark.parametrize("change", [{"tp": 2}, {"dtype": "bf16"}])
def test_another_split_or_dtype_reuses_nothing(place: Place, change: dict[str, Any]) -> None:
    place.build(**change)
    assert place.reused("shard", "export", "compile") == [False, False, False]


def test_a_fine_tune_of_the_same_shape_reuses_the_module(place: Place) -> None:
    """Other weights, name and EOS id: nothing is exported or compiled, but all is checked."""
    config = tiny.tiny_config(eos_token_id=5)
    tuned = tiny.write_tiny(place.root / "tuned", config=config, seed=7)
    result = place.build(tuned)
    assert place.work == (0, 0, 1)
    assert place.reused("shard", "export", "compile") == [False, True, True]
    assert result.manifest.module_key == place.first.manifest.module_key
    assert result.manifest.source.digest != place.first.manifest.source.digest
    assert 5 in result.manifest.eos_token_ids
    assert (place.dev_dir / "model.mlir").is_file()
    assert place.build(tuned).reused


def test_another_shape_reuses_nothing(place: Place) -> None:
    other = tiny.write_tiny(place.root / "wide", config=tiny.tiny_config(intermediate_size=160))
    place.build(other)
    assert place.work == (1, 1, 1)
    assert place.reused("shard", "compile") == [False, False]


def test_a_shorter_context_reuses_all_files(place: Place) -> None:
    result = place.build(max_model_len=64)
    assert place.work == (0, 0, 1)
    assert place.reused("shard", "export", "compile") == [True, True, True]
    assert result.manifest.max_model_len == 64


def test_a_copy_of_the_checkpoint_reuses_all_files(place: Place) -> None:
    """What counts is the content; the name in the manifest is the new one."""
    copy = Path(shutil.copytree(place.model, place.root / "copy"))
    result = place.build(copy)
    assert place.work == (0, 0, 1)
    assert result.manifest.source.name == "copy"


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_changed_small_file_is_published(place: Place, name: str) -> None:
    """The checkpoint's digest is of weights alone; a tokenizer that was corrected counts too."""
    path = place.model / name
    fields = json.loads(path.read_text()) if path.exists() else {"temperature": 0.5}
    path.write_text(json.dumps(fields, indent=7))
    result = place.build()
    assert not result.reused
    assert place.work == (0, 0, 1)
    assert (place.out_dir / name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["model.irpa", "model.vmfb", "tokenizer.json"])
def test_a_damaged_bundle_is_built_anew(place: Place, name: str) -> None:
    """One bit is enough: sizes alone would have passed it as what was asked for."""
    path = place.out_dir / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not place.build().reused
    assert place.work == (1, 1, 1)
    assert f"the bundle {place.out_dir} is damaged: {name}" in place.reporter.notes[0]


def test_a_bundle_that_was_not_checked_is_checked(place: Place) -> None:
    """--no-verify yesterday is no reason to call it verified today; the reverse is fine."""
    assert place.build(verify=False).reused
    place.build(max_model_len=64, verify=False)
    assert place.reporter.stage_note("verify") == "skipped: --no-verify"
    assert place.build(max_model_len=64).manifest.golden is not None
    assert place.work == (0, 0, 1)


def test_dev_artifacts_asked_for_later(place: Place) -> None:
    """They need the exporter, since a bundle holds no MLIR, but not the compiler."""
    result = place.build(dev_dir=place.root / "dev2")
    assert not result.reused
    assert place.work == (1, 0, 1)
    assert (place.root / "dev2" / "model.mlir").is_file()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda dev: (dev / "model.mlir").unlink(),
        lambda dev: (dev / "inputs" / "decode_bs1" / "tokens.npy").write_bytes(b""),
        lambda dev: shutil.rmtree(dev),
    ],
)
def test_incomplete_dev_artifacts_are_written_again(
    place: Place, spoil: Callable[[Path], object]
) -> None:
    spoil(place.dev_dir)
    assert not place.build().reused
    assert place.side.compiles == 0
    assert place.build().reused


def test_dev_artifacts_without_their_report_are_not_replaced(place: Place) -> None:
    """Nothing says then that the files are ours."""
    (place.dev_dir / "build-report.json").write_text("{}")
    with pytest.raises(UsageError, match="no build has written"):
        place.build()


def test_moved_dev_artifacts_are_written_again(place: Place) -> None:
    """Flagfiles name files by absolute path."""
    moved = place.dev_dir.rename(place.root / "moved")
    assert not place.build(dev_dir=moved).reused
    assert place.work[:2] == (0, 0)
    flags = (moved / "benchmark-flags.txt").read_text()
    assert str(moved / "inputs") in flags


def test_the_dry_run_says_what_would_be_reused(place: Place) -> None:
    other = settings(place.model, place.out_dir, dev_dir=place.dev_dir, target="gfx942")
    reuse = plan_build(other, ListReporter()).reuse
    assert (reuse.everything, reuse.module) == (False, None)
    assert reuse.archives is not None
    assert str(reuse) == "archives can be reused"


def test_another_exporter_is_no_reuse(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed source of this package may compute something else: it exports again."""
    monkeypatch.setattr("shark_llm.build_plan._source_digest", lambda *folders: "changed")
    assert not place.build().reused
    # The MLIR came out the same, so that the compiler need not run.
    assert place.work == (1, 0, 1)


def test_another_compiler_is_no_reuse(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version",
        lambda name: "3.13.9" if name == "iree-base-compiler" else real(name),
    )
    assert not place.build().reused
    assert place.work == (1, 1, 1)
