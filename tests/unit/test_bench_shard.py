"""scripts/bench shard: what it builds, what it keeps, and the page it writes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_samples import shard, shard_builds, shard_writing
from shark_llm.errors import UsageError

BUILD = """
import json, pathlib, sys
room = pathlib.Path(sys.argv[1])
config = json.loads((room / "model" / "config.json").read_text())
for name in ("bundle", "dev"):
    (room / name).mkdir()
stages = [
    {"name": "export", "seconds": 7.26, "peak_memory_bytes": 5, "compiler_peak_bytes": 0},
    {"name": "compile", "seconds": config["num_hidden_layers"], "peak_memory_bytes": 9 * 10**8,
     "compiler_peak_bytes": 9 * 10**8},
]
(room / "dev" / "build-report.json").write_text(json.dumps({"stages": stages}))
manifest = {"entry_points": [{"name": "decode_bs1"}], "files": {"model.vmfb": {"size": 1500000}}}
(room / "bundle" / "manifest.json").write_text(json.dumps(manifest))
sys.exit(int(sys.argv[2]))
"""


def pretend(monkeypatch: pytest.MonkeyPatch, root: Path, exit_code: int = 0) -> list[Any]:
    """Let a few lines stand for shark-compile; returns the shapes that they are called for."""
    asked: list[Any] = []

    def command(shape: Any, room: Path) -> list[str]:
        asked.append(shape)
        return [sys.executable, "-c", BUILD, str(room), str(exit_code)]

    monkeypatch.setattr(shard_builds, "_command", command)
    monkeypatch.setattr(shard_builds.peers, "CACHE", root / ".cache")
    monkeypatch.setattr(shard_builds.peers, "ROOT", root)
    return asked


def shape(text: str) -> Any:
    return shard_builds.parse_shape(text)


def test_a_build_is_kept_and_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that was broken off goes on where it was."""
    asked, kept = pretend(monkeypatch, tmp_path), tmp_path / "docs" / "builds.json"
    shapes = [shape("llama-3.1-8b:8"), shape("llama-3.2-1b:2:16")]
    shard_builds.measure(shapes[:1], kept)
    shard_builds.measure(shapes, kept)
    assert asked == shapes
    whole, depth = shard_builds.read(kept)
    assert (whole.export_seconds, whole.compile_seconds) == (7.3, 32)
    assert depth.compile_seconds == 16, "the config has the depth that is asked for"
    assert (whole.process_peak_bytes, whole.compiler_peak_bytes) == (5, 9 * 10**8)
    assert whole.module_bytes == 1500000
    assert not (tmp_path / ".cache" / "shard").exists()


def test_a_failed_build_names_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, 3)
    message = r"llama-3.1-8b:8: shark-compile ended with 3: see \.cache/shard/log"
    with pytest.raises(shard_builds.PeerError, match=message):
        shard_builds.measure([shape("llama-3.1-8b:8")], tmp_path / "builds.json")
    assert not (tmp_path / "builds.json").exists()


def test_the_command_is_a_users_own() -> None:
    words = shard_builds._command(shape("llama-3.1-405b:5"), Path("/room"))
    assert " ".join(words[1:]) == (
        "--recipe llama-3.1-405b --hf-model /room/model --weights dummy --force "
        "--compile-target gfx942 --tp 5 --output-artifacts-dir /room/bundle "
        "--output-dev-artifacts-dir /room/dev"
    )


@pytest.mark.parametrize("text", ["llama", "llama:x", "llama:1:2:3", "llama:1:"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not RECIPE:TP"):
        shard._shape(text)


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "builds.json"
    path.write_text(json.dumps([{"shape": {"recipe": "a", "tp": "two"}}]))
    with pytest.raises(UsageError, match=r"builds.json: 0\.shape\.tp: .* remove it, or correct it"):
        shard_builds.read(path)


def test_tables_say_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    kept = tmp_path / "builds.json"
    shard_builds.measure([shape("llama-3.1-8b:8"), shape("llama-3.2-1b:2:16")], kept)
    lines = shard_builds.tables(shard_builds.read(kept)).splitlines()
    assert lines[2].startswith("| `llama-3.1-8b` | 8 | 1 | 7 s | 32 s | 0 s | 0.90 GB | 0.00 GB |")
    assert lines[6].startswith("| `llama-3.2-1b` | 16 | 2 | 1 | 7 s | 16 s |")


def test_the_page_is_fresh() -> None:
    """docs/sharding.md holds what `scripts/bench shard render` writes."""
    text = shard.PAGE.read_text()
    assert shard.render(text) == text


def test_writing_is_measured_beside_cp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both write the same bytes; the ratio is taken round by round."""
    config = shard_builds.published_config("smollm2-360m")
    config |= {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    monkeypatch.setattr(shard_writing, "published_config", lambda recipe: config)
    monkeypatch.setattr(shard_writing.peers, "CACHE", tmp_path)
    monkeypatch.setattr(shard_writing, "CASES", (("f16", 2),))
    kept = tmp_path / "writing.json"
    shard_writing.measure(2, kept)
    (found,) = shard_writing.read(kept)
    assert (found.dtype, found.tp, len(found.ours), len(found.cp)) == ("f16", 2, 2, 2)
    assert found.num_bytes > 100_000
    assert not (tmp_path / "writing" / "written").exists()
    made = found.model_copy(update={"ours": [2.0, 1.0, 4.0], "cp": [1.0, 1.0, 3.0]})
    assert made.ratios == [0.5, 1.0, 0.75]
    assert "| f16 | 2 |" in shard_writing.table([made])
    assert "| 0.75 (0.50-1.00) |" in shard_writing.table([made])
