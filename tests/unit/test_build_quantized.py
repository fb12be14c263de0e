"""--weights-dtype: what a build writes and says, what it reuses, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from build_harness import FakeCompileSide, ListReporter, settings
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.artifacts.irpa import ArchiveReader
from shark_llm.build import build, plan_build
from shark_llm.cli.build_text import plan_lines
from shark_llm.errors import UsageError
from shark_llm.inspection.repro import build_command
from shark_llm.inspection.summary import summary_lines
from tiny_gguf import write_tiny_gguf


def test_a_bundle_of_int8_weights(tmp_path: Path, t0: Path, compile_side: FakeCompileSide) -> None:
    """Planned to the byte, opened again, and said wherever a dtype is."""
    asked: dict[str, Any] = {"tp": 2, "dtype": "bf16", "weights_dtype": "int8"}
    out_dir = tmp_path / "bundle"
    planned = plan_build(settings(t0, out_dir, **asked), ListReporter())
    assert any("bf16 with int8 weights" in line for line in plan_lines(planned))
    build(settings(t0, out_dir, **asked), ListReporter())
    bundle = open_bundle(out_dir, verify="digests")
    manifest = bundle.manifest
    assert (manifest.dtype, manifest.weights_dtype, manifest.kv_dtype) == ("bf16", "int8", "bf16")
    sizes = {path.name: path.stat().st_size for path in bundle.archives}
    assert sizes == planned.plan.file_bytes
    rank_1 = ArchiveReader(out_dir / "model.rank1.irpa")
    assert rank_1.entries["blk.0.attn_q.weight.rank1"].dtype == "i8"
    assert rank_1.entries["blk.0.attn_q.scale.rank1"].dtype == "f32"
    assert any("bf16 with int8 weights" in line for line in summary_lines(manifest))
    command = build_command(manifest, {})
    assert command[command.index("--weights-dtype") + 1] == "int8"


def test_nothing_is_reused_between_dtypes_of_weights(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    out_dir = tmp_path / "bundle"
    build(settings(t0, out_dir), ListReporter())
    reporter = ListReporter()
    assert not build(settings(t0, out_dir, weights_dtype="int8"), reporter).reused
    assert "reused" not in reporter.stage_note("shard") + reporter.stage_note("compile")
    assert build(settings(t0, out_dir, weights_dtype="int8"), ListReporter()).reused
    assert compile_side.compiles == 2


def test_dummy_weights_have_scales_too(
    tmp_path: Path, t0: Path, compile_side: FakeCompileSide
) -> None:
    build(settings(t0, tmp_path / "b", weights="dummy", weights_dtype="int8"), ListReporter())
    archive = ArchiveReader(tmp_path / "b" / "model.irpa")
    assert archive.read("blk.0.ffn_up.weight").max() == 1
    assert archive.read("blk.0.ffn_up.scale").max() == 2.0**-7


def test_what_is_quantized_already_is_refused_by_name(
    tmp_path: Path, compile_side: FakeCompileSide
) -> None:
    """And built when forced, with a note; a file of plain tensors is no matter."""
    config = tiny.tiny_config()
    weights = tiny.tiny_weights(config)
    q8_0 = write_tiny_gguf(tmp_path / "q8.gguf", config, weights, kind="Q8_0")
    asked = settings(q8_0, tmp_path / "b", weights_dtype="int8")
    message = (
        r"q8(\.gguf)? is quantized already \(Q8_0\): --weights-dtype int8 would round its weights "
        "a second time; build from the unquantized model"
    )
    with pytest.raises(UsageError, match=message):
        build(asked, ListReporter())
    assert not (tmp_path / "b").exists()
    reporter = ListReporter()
    build(settings(q8_0, tmp_path / "b", weights_dtype="int8", force=True), reporter)
    assert any(note.startswith("forced: ") and "Q8_0" in note for note in reporter.notes)
    plain = write_tiny_gguf(tmp_path / "f16.gguf", config, weights, kind="F16")
    build(settings(plain, tmp_path / "c", weights_dtype="int8"), ListReporter())
