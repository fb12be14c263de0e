"""Flagfiles, inputs and script for compiler engineers; the directory they lie in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bundles import T0, sample_manifest
from shark_llm.artifacts.manifest import Manifest, Target
from shark_llm.compile import compiler
from shark_llm.compile.compiler import run_compiler, shell_script
from shark_llm.compile.dev_artifacts import benchmark_inputs, write_dev_artifacts
from shark_llm.compile.dev_directory import check_replaceable, dev_staging, write_report
from shark_llm.errors import CompileError, UsageError
from shark_llm.export.signatures import ExportSettings, cache_specs, entry_points
from shark_llm.sharding.plan import plan_ranks

SETTINGS = ExportSettings(dtype="bf16")


def manifest(tp: int, **changes: object) -> Manifest:
    return sample_manifest(
        tp=tp,
        entry_points=entry_points(SETTINGS, 256),
        caches=cache_specs(T0, SETTINGS, plan_ranks(T0, tp)),
        **changes,
    )


@pytest.mark.parametrize(
    ("target", "devices"),
    [
        (Target(name="host", driver="local-task", flags=()), ["--device=local-task"] * 2),
        (
            Target(name="gfx942", driver="hip", flags=()),
            ["--device=hip://0", "--device=hip://1"],
        ),
    ],
)
def test_a_flagfile_for_every_entry_point(
    tmp_path: Path, target: Target, devices: list[str]
) -> None:
    """Absolute paths, a device per rank, every archive, every input and every cache."""
    made = manifest(2, target=target)
    dev_dir, bundle_dir = tmp_path / "dev", tmp_path / "bundle"
    dev_dir.mkdir()
    write_dev_artifacts(dev_dir, dev_dir=dev_dir, bundle_dir=bundle_dir, manifest=made)
    names = {entry.name for entry in made.entry_points}
    assert {p.stem for p in (dev_dir / "benchmark-flags").iterdir()} == names
    default = (dev_dir / "benchmark-flags.txt").read_text()
    assert default == (dev_dir / "benchmark-flags" / "decode_bs1.txt").read_text()
    for entry in made.entry_points:
        lines = (dev_dir / "benchmark-flags" / f"{entry.name}.txt").read_text().splitlines()
        assert [line for line in lines if line.startswith("--device=")] == devices
        assert f"--module={bundle_dir / 'model.vmfb'}" in lines
        assert f"--function={entry.name}" in lines
        assert f"--parameters=model={bundle_dir / 'model.rank1.irpa'}" in lines
        inputs = [line.removeprefix("--input=") for line in lines if line.startswith("--input=")]
        assert len(inputs) == len(entry.inputs) + len(made.caches)
        arrays = [np.load(text.removeprefix("@")) for text in inputs if text.startswith("@")]
        for spec, array in zip(entry.inputs, arrays, strict=True):
            fixed = [(d, s) for d, s in zip(array.shape, spec.shape, strict=True) if s == d]
            assert len(fixed) == sum(isinstance(size, int) for size in spec.shape)
        pool_pages = int(inputs[-1].split("x")[0])
        assert arrays[3].max() == pool_pages - 1  # every page that is named is there
        assert arrays[3].min() == 1  # page 0 is scratch


@pytest.mark.parametrize("max_model_len", [1, 16, 100, 4096])
def test_inputs_fit_the_model(max_model_len: int) -> None:
    """No row is longer than the model allows, no two rows share a page."""
    for entry in entry_points(SETTINGS, 256):
        tokens, starts, lengths, table = benchmark_inputs(entry, 16, max_model_len)
        assert lengths.max() <= max_model_len
        assert (starts < lengths).all()
        assert (table.shape[1] * 16 >= lengths).all()
        assert len(np.unique(table)) == table.size
        assert tokens.shape[0] == entry.batch_size


def test_the_script_runs_from_any_directory(tmp_path: Path) -> None:
    """Output goes where the caller is, the source is found beside the script; quoting holds."""
    place = tmp_path / "a place"
    place.mkdir()
    (place / "iree-compile").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$3"; pwd >> "$3"\n')
    (place / "iree-compile").chmod(0o755)
    script = place / "compile-command.sh"
    script.write_text(shell_script("model.mlir", "model.vmfb", ["--device=local[0]", "--x=a b"]))
    script.chmod(0o755)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([script], cwd=elsewhere, env=env, check=True)
    lines = (elsewhere / "model.vmfb").read_text().splitlines()
    assert lines == [
        "model.mlir", "-o", str(elsewhere / "model.vmfb"),
        "--device=local[0]", "--x=a b", str(place),
    ]  # fmt: skip
    subprocess.run([script, "other.vmfb"], cwd=elsewhere, env=env, check=True)
    assert (elsewhere / "other.vmfb").exists()


# --- the directory -------------------------------------------------------------------------------


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "dev"
    for text in ("old", "new"):
        with dev_staging(target) as staging:
            assert staging is not None
            (staging / f"{text}.txt").write_text(text)
            write_report(staging, {})
    assert sorted(p.name for p in target.iterdir()) == ["build-report.json", "new.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["dev"]


def test_what_dead_builds_left_is_removed(tmp_path: Path) -> None:
    """Told by the process id in the name; those of a living process stay."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for pid in (process.pid, os.getppid()):
        (tmp_path / f".dev.partial-{pid}").mkdir()
    with dev_staging(tmp_path / "dev") as staging:
        assert staging is not None
        write_report(staging, {})
    assert {p.name for p in tmp_path.iterdir()} == {"dev", f".dev.partial-{os.getppid()}"}


def test_a_file_that_came_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "dev"

    def build_while_a_user_writes() -> None:
        with dev_staging(target):
            target.mkdir()
            (target / "mine.txt").touch()

    with pytest.raises(UsageError, match=r"mine\.txt"):
        build_while_a_user_writes()
    assert (target / "mine.txt").exists()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "dev").touch()
    with pytest.raises(UsageError, match="is a file"):
        check_replaceable(tmp_path / "dev")


# --- the compiler's process ----------------------------------------------------------------------


def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Stands for iree-compile; returns a source for it."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "iree-compile"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(compiler, "compiler_executable", lambda: script)
    source = tmp_path / "model.mlir"
    source.write_text("module {}")
    return source


def test_the_first_diagnostic_is_shown_and_all_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'echo "a note"; echo "model.mlir:3:5: error: no such op" >&2; echo x > "$3"; exit 1'
    source = fake_compiler(tmp_path, monkeypatch, body)
    with pytest.raises(CompileError) as caught:
        run_compiler(source, tmp_path / "out.vmfb", ["--f"])
    message = str(caught.value)
    assert "failed with exit code 1 after 0 s: model.mlir:3:5: error: no such op" in message
    assert f"iree-compile model.mlir -o {tmp_path / 'out.vmfb'} --f" in message
    assert "a note" in (tmp_path / "compiler-output.txt").read_text()
    assert not (tmp_path / "out.vmfb").exists()


def test_temporary_files_lie_where_the_output_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F06: a small /tmp does not matter as long as the target has room."""
    source = fake_compiler(tmp_path, monkeypatch, 'echo x > "$TMPDIR/temporary"; pwd > "$3"; env')
    monkeypatch.setenv("TMPDIR", "/no/such/place")
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    run_compiler(source, out_dir / "model.vmfb", [])
    assert [path.name for path in out_dir.iterdir()] == ["model.vmfb"]


def test_a_compiler_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake_compiler(tmp_path, monkeypatch, "kill -SEGV $$")
    with pytest.raises(CompileError, match="was killed by signal 11"):
        run_compiler(source, tmp_path / "out.vmfb", [])


def test_a_compiler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fake_compiler(tmp_path, monkeypatch, "")
    (tmp_path / "bin" / "iree-compile").unlink()
    with pytest.raises(CompileError, match=r"pip install 'shark-llm\[compile\]'"):
        run_compiler(source, tmp_path / "out.vmfb", [])


def test_time_and_memory_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own memory: wait4 counts from the fork, and then this process's was shown as the
    compiler's."""
    ballast = bytearray(b"x") * (200 << 20)
    source = fake_compiler(tmp_path, monkeypatch, 'cp model.mlir "$3"; sleep 0.2')
    result = run_compiler(source, tmp_path / "out.vmfb", [])
    assert 0 < result.peak_memory_bytes < len(ballast) // 4
    assert result.seconds > 0
    assert (tmp_path / "out.vmfb").read_text() == "module {}"
