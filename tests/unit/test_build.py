"""The build as a whole: what is published, kept, refused and cleaned away. No compiler runs."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

import tiny
from build_harness import GOLDEN, FakeCompileSide, ListReporter, settings
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.build import BuildResult, build, plan_build
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.errors import (
    CapacityError,
    CompileError,
    ShardingError,
    SharkError,
    UnsupportedModelError,
    UnsupportedTargetError,
    UsageError,
    VerificationError,
)
from shark_llm.hub import HubSettings
from shark_llm.reuse import Reuse


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.is_file()}


def test_a_bundle_and_its_dev_artifacts(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    reporter = ListReporter()
    out_dir, dev_dir = tmp_path / "bundle", tmp_path / "dev"
    result = build(settings(t0, out_dir, dev_dir=dev_dir, tp=2), reporter)
    assert not result.reused
    manifest = open_bundle(out_dir, verify="digests").manifest
    assert manifest == result.manifest
    assert (manifest.source.name, manifest.tp, manifest.dtype) == ("t0", 2, "f32")
    assert manifest.golden == GOLDEN
    assert {"tokenizer.json", "config.json", "model.rank1.irpa"} <= manifest.files.keys()
    assert "model.mlir" not in manifest.files
    assert (dev_dir / "model.mlir").is_file()
    assert (dev_dir / "compile-command.sh").stat().st_mode & 0o111
    assert reporter.started == [
        "resolve", "plan", "compare", "shard", "export", "compile", "verify", "publish",
    ]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "dev", "t0"]


def test_the_report_says_what_was_built(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    """time and peak memory of each stage, the compiler's own included, and the module's key."""
    dev_dir = tmp_path / "dev"
    result = build(settings(t0, tmp_path / "bundle", dev_dir=dev_dir), ListReporter())
    report = json.loads((dev_dir / "build-report.json").read_text())
    assert report["module_key"] == result.manifest.module_key
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert stages["compile"]["peak_memory_bytes"] == 1 << 40
    assert stages["compile"]["compiler_peak_bytes"] == 1 << 40
    assert 0 < stages["shard"]["peak_memory_bytes"] < 1 << 40
    assert all(stage["seconds"] >= 0 for stage in stages.values())
    assert report["settings"]["batch_sizes_decode"] == [1]
    assert "hub" not in report["settings"]
    assert "model.mlir" in report["files"]


def test_cpus_take_decode_batches_of_16_by_default(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    for target, sizes in (("host", (1, 4, 8, 16)), ("gfx942", (1, 4, 8))):
        wanted = settings(t0, tmp_path / target, target=target, batch_sizes_decode=None)
        built = build(wanted, ListReporter()).manifest.entry_points
        assert tuple(e.batch_size for e in built if e.phase == "decode") == sizes


def test_intermediates_come_from_a_run_of_their_own(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    """Dump flags change the module: its digest would not be what compile-command.sh gives."""
    out_dir, dev_dir = tmp_path / "bundle", tmp_path / "dev"
    plain = build(settings(t0, tmp_path / "plain"), ListReporter())
    wanted = settings(t0, out_dir, dev_dir=dev_dir, save_intermediates=True)
    dumped = build(wanted, ListReporter())
    assert dumped.manifest.files["model.vmfb"] == plain.manifest.files["model.vmfb"]
    for name in ("phases", "executable-sources", "executable-benchmarks"):
        assert (dev_dir / name / "a.mlir").is_file()
    assert not (dev_dir / "model.vmfb").exists()
    assert build(wanted, ListReporter()).reused
    assert compile_side.compiles == 3


def test_a_dry_run_changes_nothing(tmp_path: Path, t0: Path, compile_side: FakeCompileSide) -> None:
    wanted = settings(t0, tmp_path / "bundle", dev_dir=tmp_path / "dev")
    before = plan_build(wanted, ListReporter())
    assert (before.reuse, before.dev_is_there) == (Reuse(), False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t0"]
    result = build(wanted, ListReporter())
    size = before.plan.file_bytes["model.irpa"]
    assert result.manifest.files["model.irpa"].size == size
    after = plan_build(wanted, ListReporter())
    assert (after.reuse.everything, after.dev_is_there) == (True, True)
    assert after.needed_bytes == before.needed_bytes - size


def test_a_flag_without_effect_is_said(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    reporter = ListReporter()
    hub = HubSettings(cache_dir=tmp_path / "cache")
    build(settings(t0, tmp_path / "bundle", hub=hub), reporter)
    assert f"{t0} is a local path: --hf-cache-dir has no effect" in reporter.notes
    assert not (tmp_path / "cache").exists()


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"target": "gfx943"}, UnsupportedTargetError, "'gfx943': choose from host, x86-64-v3"),
        ({"tp": 5}, ShardingError, "5"),
        ({"page_size": 17}, UsageError, "page size 17"),
        ({"batch_sizes_decode": (4, 1)}, UsageError, "--batch-sizes-decode 4 1"),
        ({"batch_sizes_prefill": (1, 1000)}, UsageError, "--batch-sizes-prefill 1 1000"),
        ({"max_model_len": 513}, UsageError, "--max-model-len is 513: this model takes 1 to 512"),
        ({"save_intermediates": True}, UsageError, "needs --output-dev-artifacts-dir"),
        ({"model": "./nope"}, UsageError, "./nope: no such file or directory"),
    ],
)
def test_refused_before_anything_is_written(
    tmp_path: Path,
    t0: Path,
    compile_side: FakeCompileSide,
    changes: dict[str, object],
    error: type[SharkError],
    words: str,
) -> None:
    model = changes.pop("model", t0)
    with pytest.raises(error) as caught:
        build(settings(model, tmp_path / "bundle", **changes), ListReporter())  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["t0"]
    assert compile_side.exports == 0


def test_a_foreign_file_in_the_output_is_never_deleted(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not part of a bundle.*thesis\.txt"):
        build(settings(t0, tmp_path / "bundle"), ListReporter())
    assert (tmp_path / "bundle" / "thesis.txt").read_text() == "mine"
    assert compile_side.exports == 0


@pytest.mark.parametrize("name", ["notes.txt", "inputs/mine.npy"])
def test_a_foreign_file_among_dev_artifacts_is_never_deleted(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, name: str
) -> None:
    """Also beside those of an older build; the module that compile-command.sh writes is ours."""
    wanted = settings(t0, tmp_path / "bundle", dev_dir=tmp_path / "dev")
    build(wanted, ListReporter())
    (tmp_path / "dev" / "model.vmfb").write_bytes(b"made by compile-command.sh")
    assert build(wanted, ListReporter()).reused
    (tmp_path / "dev" / name).write_text("mine")
    other = settings(t0, tmp_path / "bundle", dev_dir=tmp_path / "dev", page_size=32)
    with pytest.raises(UsageError, match="no build has written"):
        build(other, ListReporter())
    assert (tmp_path / "dev" / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("out", "dev"), [("b", "b"), ("b", "b/dev"), ("d/bundle", "d"), ("b", "link")]
)
def test_the_two_directories_must_not_lie_in_each_other(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, out: str, dev: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "b")
    with pytest.raises(UsageError, match="lie in each other"):
        build(settings(t0, tmp_path / out, dev_dir=tmp_path / dev), ListReporter())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "t0"]


def test_a_disk_that_is_too_small(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F06: needed against free is said before the work starts."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CapacityError, match=r"needs 67543040 bytes and 1000 are free"):
        build(settings(t0, tmp_path / "bundle"), ListReporter())
    assert [p.name for p in tmp_path.iterdir()] == ["t0"]
    assert compile_side.exports == 0


def test_what_we_do_not_implement_is_refused_from_its_config(
    tmp_path: Path, compile_side: FakeCompileSide
) -> None:
    """Before a weight is looked at: there is no weight file here at all."""
    config = tiny.tiny_config(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    tiny.write_tiny(tmp_path / "qwen", config=config)
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM"):
        build(settings(tmp_path / "qwen", tmp_path / "bundle"), ListReporter())


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [CompileError("no such flag"), KeyboardInterrupt(), OSError(5)])
def test_a_failing_compiler_leaves_the_old_bundle(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, error: BaseException
) -> None:
    out_dir, dev_dir = tmp_path / "bundle", tmp_path / "dev"
    build(settings(t0, out_dir, dev_dir=dev_dir), ListReporter())
    old, old_dev = contents(out_dir), contents(dev_dir)

    def fail(source: Path) -> None:
        raise error

    compile_side.on_compile = fail
    with pytest.raises(type(error)):
        build(settings(t0, out_dir, dev_dir=dev_dir, page_size=32), ListReporter())
    assert contents(out_dir) == old
    assert contents(dev_dir) == old_dev
    left = {p.name for p in tmp_path.iterdir()} - {"bundle", "dev", "t0"}
    assert left == ({"dev.failed"} if isinstance(error, CompileError) else set())


def test_what_the_compiler_failed_on_is_kept(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    """A compiler engineer needs the source most when there is no module."""

    def fail(source: Path) -> None:
        source.with_name("compiler-output.txt").write_text("all of it")
        raise CompileError("iree-compile failed")

    compile_side.on_compile = fail
    wanted = settings(t0, tmp_path / "bundle", dev_dir=tmp_path / "dev")
    for _ in range(2):  # the second takes the place of the first
        with pytest.raises(CompileError) as caught:
            build(wanted, ListReporter())
        kept = tmp_path / "dev.failed"
        assert str(caught.value).endswith(f"source and command are kept in {kept}")
        assert {"model.mlir", "compile-command.sh", "compiler-output.txt"} <= contents(kept).keys()
        assert not (tmp_path / "bundle").exists()
        assert not (tmp_path / "dev").exists()


def test_a_module_that_computes_something_else_is_not_published(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*args: object, **kwargs: object) -> None:
        raise VerificationError("logits differ by 3")

    monkeypatch.setattr("shark_llm.build_work.run_golden", differs)
    with pytest.raises(VerificationError, match="differ by 3"):
        build(settings(t0, tmp_path / "bundle"), ListReporter())
    assert [p.name for p in tmp_path.iterdir()] == ["t0"]


# --- two at once ---------------------------------------------------------------------------------


def test_the_second_build_of_a_directory_waits_and_reuses(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    """F04: two compiles to one directory; here the same, so that the second need not work."""
    inside, go_on = threading.Event(), threading.Event()

    def hold(source: Path) -> None:
        inside.set()
        assert go_on.wait(60)

    compile_side.on_compile = hold
    wanted = settings(t0, tmp_path / "bundle", dev_dir=tmp_path / "dev")
    results: dict[str, BuildResult] = {}
    waiting = ListReporter()

    def run(name: str, reporter: ListReporter) -> None:
        results[name] = build(wanted, reporter)

    first = threading.Thread(target=run, args=("first", ListReporter()))
    second = threading.Thread(target=run, args=("second", waiting))
    first.start()
    assert inside.wait(60)
    second.start()
    for _ in range(600):
        if waiting.notes:
            break
        threading.Event().wait(0.05)
    go_on.set()
    first.join(60)
    second.join(60)
    assert waiting.notes[0].startswith("waiting for pid ")
    assert not results["first"].reused
    assert results["second"].reused
    assert results["second"].manifest == results["first"].manifest
    assert (compile_side.exports, compile_side.compiles) == (1, 1)


def test_two_builds_of_one_directory_never_mix(
    tmp_path: Path, compile_side: FakeCompileSide
) -> None:
    """F04: other weights of the same shape; whoever comes last, the bundle is wholly theirs."""
    models = [tiny.write_tiny(tmp_path / f"seed{seed}", seed=seed) for seed in range(2)]
    threads = [
        threading.Thread(target=build, args=(settings(m, tmp_path / "bundle"), ListReporter()))
        for m in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    bundle = open_bundle(tmp_path / "bundle", verify="digests")
    (model,) = [m for m in models if m.name == bundle.manifest.source.name]
    assert bundle.manifest.source.digest == open_checkpoint(model).digest()
    assert compile_side.compiles == 1  # the same shape: the second reuses the module
