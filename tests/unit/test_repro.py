"""shark-compile repro: all that a compiler engineer needs, and of this very bundle."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import tiny
from build_harness import FakeCompileSide, ListReporter, settings
from shark_llm.build import build
from shark_llm.errors import ArtifactError
from shark_llm.inspection.repro import repro_markdown


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A bundle and its dev artifacts."""
    FakeCompileSide.install(monkeypatch)
    model = tiny.write_tiny(tmp_path / "t0")
    out_dir, dev_dir = tmp_path / "bundle", tmp_path / "dev"
    extra = ("--iree-opt-level=O3",)
    build(settings(model, out_dir, dev_dir=dev_dir, extra_compile_args=extra), ListReporter())
    return out_dir, dev_dir


def test_with_dev_artifacts(built: tuple[Path, Path], tmp_path: Path) -> None:
    out_dir, dev_dir = built
    text = repro_markdown(out_dir, dev_dir)
    for words in (
        "### t0, f32, tp 1, x86-64-v3",
        "| iree-base-compiler | 3.13",
        "- CPU: ",
        " GiB",
        "- kernel: Linux ",
        f"shark-compile --hf-model {tmp_path / 't0'} --dtype f32 --compile-target x86-64-v3",
        "--extra-compile-arg=--iree-opt-level=O3",
        f"`{dev_dir / 'model.mlir'}` (please attach it)",
        f"iree-benchmark-module --flagfile={dev_dir / 'benchmark-flags.txt'}",
        "--function=decode_bs1",
        "| model.vmfb | 32 | `",
        "passed, largest error 1e-06 of 0.001",
    ):
        assert words in text, words
    assert text.count("```") % 2 == 0


def test_the_build_command_builds_the_same(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Typed as it stands, it finds that the bundle is what it asks for."""
    from shark_llm.cli import compile as compile_cli

    out_dir, dev_dir = built
    text = repro_markdown(out_dir, dev_dir)
    (line,) = [line for line in text.splitlines() if line.startswith("shark-compile ")]
    words = shlex.split(line)[1:]
    words[words.index("bundle")], words[words.index("dev")] = str(out_dir), str(dev_dir)
    before = (out_dir / "manifest.json").stat().st_mtime_ns
    with pytest.raises(SystemExit) as caught:
        compile_cli.main(words)
    assert caught.value.code == 0
    assert (out_dir / "manifest.json").stat().st_mtime_ns == before


def test_from_the_bundle_alone(built: tuple[Path, Path]) -> None:
    text = repro_markdown(built[0], None)
    assert "shark-compile --hf-model t0" in text
    assert "The build above writes it to `dev/model.mlir`" in text
    assert "--iree-opt-level=O3" in text  # among the compiler's flags
    assert "Made from the manifest" in text


def test_dev_artifacts_of_another_build_are_refused(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    out_dir, dev_dir = built
    build(settings(tmp_path / "t0", out_dir, page_size=32), ListReporter())
    with pytest.raises(ArtifactError, match="of another build"):
        repro_markdown(out_dir, dev_dir)
    with pytest.raises(ArtifactError, match="holds no dev artifacts"):
        repro_markdown(out_dir, tmp_path)
