"""The build benchmark reads what a build took from the process and from its report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmark_samples import builds

BUILD = """
import json, pathlib, sys
room = bytearray(64 << 20)
dev = pathlib.Path(sys.argv[1])
dev.mkdir()
stages = [{"name": "export", "seconds": 1.5, "peak_memory_bytes": 1, "note": ""}]
(dev / "build-report.json").write_text(json.dumps({"stages": stages}))
sys.exit(int(sys.argv[2]))
"""


def pretend(monkeypatch: pytest.MonkeyPatch, root: Path, exit_code: int) -> None:
    """Let a few lines stand for shark-compile."""

    def command(dtype: str, bundle_dir: Path, dev_dir: Path) -> list[str]:
        assert dtype == "bf16"
        return [sys.executable, "-c", BUILD, str(dev_dir), str(exit_code)]

    monkeypatch.setattr(builds.demo_model, "fetch", lambda: False)
    monkeypatch.setattr(builds.peers, "compile_command", command)
    monkeypatch.setattr(builds.peers, "ROOT", root)
    monkeypatch.setattr(builds.peers, "CACHE", root / ".cache")


def test_a_build_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 0)
    (timing,) = builds.measure("bf16", [1], 2)
    assert timing.cores == 1
    assert timing.values["stage_export_s"] == [1.5, 1.5]
    assert len(timing.values["wall_s"]) == 2
    assert all(value >= 64 for value in timing.values["peak_mib"])
    assert all(value > 0 for value in timing.values["cpu_s"])


def test_a_failed_build_names_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 3)
    with pytest.raises(builds.PeerError, match=r"exit code 3: see \.cache/build/log"):
        builds.measure("bf16", [1], 1)
