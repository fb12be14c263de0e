"""shark-compile inspect: the summary says what the manifest says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bundles import T0, sample_manifest
from shark_llm.artifacts.manifest import GoldenReport, Manifest, Source
from shark_llm.export.signatures import ExportSettings, cache_specs, entry_points
from shark_llm.inspection.summary import kv_bytes_per_token, summarize, summary_lines
from shark_llm.planner import kv_bytes_per_token as planned_kv_bytes
from shark_llm.sharding.plan import plan_ranks

SETTINGS = ExportSettings(dtype="f32")


def manifest(tp: int = 2, **changes: object) -> Manifest:
    return sample_manifest(
        tp=tp,
        entry_points=entry_points(SETTINGS, 256),
        caches=cache_specs(T0, SETTINGS, plan_ranks(T0, tp)),
        **changes,
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_kv_bytes_are_those_of_the_planner(tp: int) -> None:
    """One figure from caches as compiled, one from the config: they must agree."""
    found = kv_bytes_per_token(manifest(tp))
    assert found == [planned_kv_bytes(T0, shape, "f32") for shape in plan_ranks(T0, tp)]


def test_lines_to_read() -> None:
    golden = GoldenReport(max_abs_error=5e-6, tolerance=1e-2, prompt_tokens=48, decode_steps=4)
    source = Source(name="org/tiny", revision="f" * 40, digest="a" * 64)
    lines = summary_lines(manifest(golden=golden, source=source))
    text = "\n".join(lines)
    assert lines[0] == f"model         org/tiny at {'f' * 40}, DUMMY WEIGHTS"
    assert "4 query and 2 kv heads of 16" in text
    assert "tp            2; " in text
    assert "split dim 0" in text
    assert "256 + 256 bytes per token" in text
    assert "flags         --some-flag=1" in text
    assert (
        "entry point   decode_bs8(tokens 8x1xi64, start_positions 8xi64, seq_lens 8xi64, "
        "page_table 8xtable_pagesxi64) -> (logits 8x256xf32, best_tokens 8xi64)"
    ) in lines
    assert "iree-base-compiler 3.13.0" in text
    assert "largest error 5e-06 of 0.01 allowed" in lines[-1]
    assert summary_lines(manifest())[-1].endswith("not run when it was built")


def test_the_data_is_json() -> None:
    summary = json.loads(json.dumps(summarize(manifest())))
    assert summary["model"]["digest"] == "a" * 64
    assert sum(summary["plan"].values()) == len(manifest().plan)
    assert set(summary["entry_points"]) == {e.name for e in manifest().entry_points}
    assert summary["golden"] is None


def test_a_damaged_bundle_can_still_be_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the manifest is read: also of a bundle of another IREE, or one that is half copied."""
    from shark_llm.artifacts.manifest import encode_manifest
    from shark_llm.cli import compile as compile_cli

    (tmp_path / "manifest.json").write_bytes(
        encode_manifest(manifest(versions={"iree-base-compiler": "1.0"}))
    )
    with pytest.raises(SystemExit) as caught:
        compile_cli.main(["inspect", str(tmp_path)])
    assert caught.value.code == 0
    assert "iree-base-compiler 1.0" in capsys.readouterr().out
