"""artifacts/manifest.py: canonical bytes, helpful refusals, digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bundles import model_config, sample_manifest
from shark_llm.artifacts.manifest import digest_files, encode_manifest, read_manifest
from shark_llm.errors import ArtifactError, SharkError, VersionMismatchError


def write(path: Path, **changes: Any) -> Path:
    fields = json.loads(encode_manifest(sample_manifest())) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    return path


def refusal(path: Path) -> SharkError:
    with pytest.raises(ArtifactError) as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_manifest_survives_the_file_and_equal_ones_are_equal_bytes(tmp_path: Path) -> None:
    manifest = sample_manifest()
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest))
    again = read_manifest(tmp_path / "manifest.json")
    assert again == manifest
    assert encode_manifest(again) == encode_manifest(manifest)
    keys = list(json.loads(encode_manifest(manifest)))
    assert keys == sorted(keys)


def test_the_model_keeps_its_true_number_of_kv_heads(tmp_path: Path) -> None:
    """B02: at tp4 each rank holds one of 2 kv heads; the manifest still says 2."""
    manifest = sample_manifest(tp=4)
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest))
    assert read_manifest(tmp_path / "manifest.json").config["num_kv_heads"] == 2
    assert model_config().num_kv_heads == 2


@pytest.mark.parametrize(("version", "remedy"), [(3, "install a newer shark-llm"), (1, "rebuild")])
def test_another_schema_version_names_both_and_the_remedy(
    version: int, remedy: str, tmp_path: Path
) -> None:
    """A newer writer may add fields: the version is judged before anything else."""
    error = refusal(write(tmp_path / "manifest.json", schema_version=version, more=[1], tp=...))
    assert isinstance(error, VersionMismatchError)
    assert f"schema version {version}, this shark-llm reads 2" in str(error)
    assert remedy in str(error)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"tp": "many"}, "tp: Input should be a valid integer"),
        ({"tp": ...}, "tp: Field required"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"schema_version": "one"}, "schema_version: Input should be 2"),
        ({"plan": {"a": {"kind": "spread"}}}, "plan.a: Input tag 'spread'"),
        ({"tp": "many", "vocab_size": None}, "and 1 more fault"),
    ],
)
def test_a_malformed_field_is_named(changes: dict[str, Any], where: str, tmp_path: Path) -> None:
    error = refusal(write(tmp_path / "manifest.json", **changes))
    assert where in str(error)
    assert str(tmp_path) in str(error)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_json_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    assert "is not JSON" in str(refusal(tmp_path / "manifest.json"))


@pytest.mark.parametrize("content", [b"[]", b"null", b"1"])
def test_json_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    assert "is not a manifest: the top level" in str(refusal(tmp_path / "manifest.json"))


def test_a_missing_manifest_says_that_there_is_no_bundle(tmp_path: Path) -> None:
    error = refusal(tmp_path / "manifest.json")
    assert f"no bundle at {tmp_path}" in str(error)
    assert "shark-compile" in str(error)


def test_digests_are_sha256_of_the_files(tmp_path: Path) -> None:
    contents = {f"d/{i}": bytes([i]) * i * 1000 for i in range(20)}
    (tmp_path / "d").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = digest_files(tmp_path, contents)
    assert {name: (info.size, info.sha256) for name, info in found.items()} == {
        name: (len(content), hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
