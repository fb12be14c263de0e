"""Flagfiles run as they stand, from any directory: the reproduction step of a compiler bug."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CompiledModel = Callable[[str], Any]  # of conftest.py: name -> Compiled
TOOL = Path(sys.executable).parent / "iree-benchmark-module"


def benchmark(flagfile: Path, cwd: Path) -> list[dict[str, Any]]:
    run = subprocess.run(
        [TOOL, f"--flagfile={flagfile}", "--benchmark_format=json", "--benchmark_min_time=1x"],
        cwd=cwd,
        check=True,
        capture_output=True,
        text=True,
    )
    found: list[dict[str, Any]] = json.loads(run.stdout[run.stdout.index("{") :])["benchmarks"]
    return found


@pytest.mark.parametrize("name", ["t0", "tp2", "tp8"])
def test_every_flagfile_runs_from_another_directory(
    tmp_path: Path, compiled: CompiledModel, name: str
) -> None:
    """The default, which is the smallest decode, and one for each entry point."""
    made = compiled(name)
    entries = [entry.name for entry in made.bundle.manifest.entry_points]
    files = {path.stem: path for path in (made.dev / "benchmark-flags").iterdir()}
    assert sorted(files) == sorted(entries)
    for entry in entries:
        (result,) = benchmark(files[entry], tmp_path)
        assert entry in result["name"]
        assert result["real_time"] > 0
        assert "error_occurred" not in result
    smallest = min((e for e in entries if e.startswith("decode")), key=len)
    (default,) = benchmark(made.dev / "benchmark-flags.txt", tmp_path)
    assert smallest in default["name"]
