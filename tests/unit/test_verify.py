"""shark-compile verify: every fault of a bundle is found and named, none stops the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundles import publish_sample, sample_manifest
from shark_llm.artifacts.manifest import GoldenReport, Target
from shark_llm.errors import VerificationError
from shark_llm.golden_run import available_memory, why_not_here
from shark_llm.inspection import verify as verify_module
from shark_llm.inspection.verify import Check, verify_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return publish_sample(tmp_path / "bundle")


def checks(bundle: Path, *, digests: bool = True, golden: bool = False) -> dict[str, Check]:
    return {check.name: check for check in verify_bundle(bundle, digests=digests, golden=golden)}


def failed(bundle: Path, **flags: bool) -> list[str]:
    return [name for name, check in checks(bundle, **flags).items() if check.status == "FAILED"]


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = bundle / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def test_a_sound_bundle(bundle: Path) -> None:
    found = checks(bundle)
    assert failed(bundle) == []
    assert found["manifest"].detail == "schema version 2 of 2"
    assert found["IREE version"].detail.startswith("built with 3.13.0, 3.13")
    assert found["model.rank1.irpa identity"].detail.startswith("model aaaaaaaaaaaa, tp=2, rank=1")
    assert "4 bytes, sha256 " in found["model.vmfb"].detail
    assert found["golden check"].detail == "--no-golden"


def test_all_faults_are_named(bundle: Path) -> None:
    """A cut file, a changed one and a missing one at once."""
    (bundle / "model.vmfb").write_bytes(b"vmf")
    (bundle / "model.rank0.irpa").unlink()
    data = bytearray((bundle / "model.irpa").read_bytes())
    data[-1] ^= 1
    (bundle / "model.irpa").write_bytes(data)
    assert failed(bundle) == [
        "model.rank0.irpa identity", "model.irpa", "model.rank0.irpa", "model.vmfb",
    ]  # fmt: skip
    found = checks(bundle, golden=True)
    assert found["model.vmfb"].detail == "has 3 bytes instead of 4"
    assert found["model.irpa"].detail.startswith("has sha256 ")
    assert found["model.rank0.irpa"].detail == "No such file or directory"
    assert found["golden check"].detail == "the bundle is damaged"
    assert "model.irpa" not in failed(bundle, digests=False)  # only reading it tells


def test_an_archive_of_another_model(bundle: Path, tmp_path: Path) -> None:
    """F09: equal names and shapes; the digest inside tells, also when the manifest was adapted."""
    other = publish_sample(tmp_path / "other", digest="c" * 64)
    (bundle / "model.rank0.irpa").write_bytes((other / "model.rank0.irpa").read_bytes())
    found = checks(bundle)["model.rank0.irpa identity"]
    assert found.status == "FAILED"
    assert "model cccccccccccc" in found.detail


def test_another_iree(bundle: Path) -> None:
    """F07: both sides and the remedy are named."""
    edit_manifest(bundle, lambda m: m["versions"].update({"iree-base-compiler": "3.12.1"}))
    found = checks(bundle)["IREE version"]
    assert found.status == "FAILED"
    assert "iree-base-compiler 3.12.1, and iree-base-runtime 3.13" in found.detail
    assert "rebuild" in found.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({"schema_version": 3}), "install a newer shark-llm"),
        (lambda m: m.pop("tp"), "is not a manifest: tp"),
    ],
)
def test_a_manifest_that_cannot_be_read(
    bundle: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    edit_manifest(bundle, change)
    (only,) = checks(bundle).values()
    assert (only.name, only.status) == ("manifest", "FAILED")
    assert words in only.detail


def test_no_bundle(tmp_path: Path) -> None:
    (only,) = checks(tmp_path).values()
    assert only.status == "FAILED"
    assert f"no bundle at {tmp_path}" in only.detail


def test_a_manifest_that_reaches_outside(bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m["files"].update({"../x": {"size": 1, "sha256": "0" * 64}}))
    assert checks(bundle)["../x"].detail == "reaches out of the bundle"


def test_what_is_worth_knowing_is_no_failure(bundle: Path) -> None:
    """Another CPU, another package version, a file beside."""
    (bundle / "notes.txt").touch()
    edit_manifest(bundle, lambda m: m["target"].update({"cpu_features": ["avx1024"]}))
    edit_manifest(bundle, lambda m: m["versions"].update({"shark-llm": "9.9"}))
    found = checks(bundle)
    for name in ("notes.txt", "target", "shark-llm version"):
        assert found[name].status == "note"
    assert "this CPU lacks avx1024" in found["target"].detail
    assert failed(bundle) == []


def test_a_gpu_target_is_not_looked_for(bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m["target"].update({"name": "gfx942", "driver": "hip"}))
    assert checks(bundle)["target"].status == "skipped"


def test_where_the_golden_check_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere but: on dummy weights, other devices, CPUs that lack something, small machines."""
    here = sample_manifest(weights="checkpoint")
    assert why_not_here(here, 1000) is None
    assert why_not_here(sample_manifest(), 1000) == "the weights are dummies"
    gpu = Target(name="gfx942", driver="hip", flags=())
    assert why_not_here(here.model_copy(update={"target": gpu}), 0) == (
        "gfx942 does not run on this machine"
    )
    odd = Target(name="x", driver="local-task", flags=(), cpu_features=("avx1024",))
    assert why_not_here(here.model_copy(update={"target": odd}), 0) == "this CPU lacks avx1024"
    memory = available_memory()
    assert memory is not None
    assert "GB of memory" in (why_not_here(here, memory) or "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torch is not installed" in (why_not_here(here, 0) or "")


def test_the_golden_check_counts(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = GoldenReport(max_abs_error=1e-6, tolerance=1e-3, prompt_tokens=48, decode_steps=4)
    monkeypatch.setattr(verify_module, "why_not_here", lambda manifest, size: None)
    monkeypatch.setattr(verify_module, "run_golden_of_bundle", lambda bundle: report)
    assert "largest error 1e-06 of 0.001" in checks(bundle, golden=True)["golden check"].detail

    def differs(bundle: object) -> None:
        raise VerificationError("logits differ by 3")

    monkeypatch.setattr(verify_module, "run_golden_of_bundle", differs)
    assert failed(bundle, golden=True) == ["golden check"]
