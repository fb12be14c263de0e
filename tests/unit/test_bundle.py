"""artifacts/bundle.py: a sound bundle opens from anywhere, every other one is refused by name."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from bundles import VERSIONS, publish_sample
from shark_llm.artifacts import bundle as module
from shark_llm.artifacts.bundle import check_versions, open_bundle
from shark_llm.artifacts.manifest import Manifest
from shark_llm.errors import ArtifactError, VersionMismatchError

RUNTIME = "3.13.2"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return publish_sample(tmp_path / "bundle")


def refusal(path: Path, verify: str = "sizes") -> str:
    with pytest.raises(ArtifactError) as caught:
        open_bundle(path, verify=verify, runtime_version=RUNTIME)  # type: ignore[arg-type]
    return str(caught.value)


def edit_manifest(bundle: Path, **changes: object) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_sound_bundle_opens(bundle: Path) -> None:
    opened = open_bundle(bundle, verify="digests", runtime_version=RUNTIME)
    assert opened.module == bundle / "model.vmfb"
    assert [p.name for p in opened.archives] == [
        "model.irpa",
        "model.rank0.irpa",
        "model.rank1.irpa",
    ]
    assert set(opened.manifest.files) == {"model.vmfb", *(p.name for p in opened.archives)}


def test_it_opens_copied_read_only_and_through_a_symlink(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(bundle, copy)
    for path in (*copy.iterdir(), copy):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / "link").symlink_to(copy)
    before = sorted(os.listdir(copy.parent))
    assert open_bundle(tmp_path / "link", verify="digests", runtime_version=RUNTIME)
    assert sorted(os.listdir(copy.parent)) == before, "opening writes nothing"
    copy.chmod(0o755)


@pytest.mark.parametrize("name", ["model.vmfb", "model.irpa", "model.rank1.irpa"])
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    """B09, F09: deleted."""
    (bundle / name).unlink()
    assert f"{name} is missing" in refusal(bundle)


@pytest.mark.parametrize("name", ["model.vmfb", "model.irpa", "model.rank1.irpa"])
@pytest.mark.parametrize("keep", [0, 3])
def test_an_emptied_or_cut_file_is_named(bundle: Path, name: str, keep: int) -> None:
    """F09: emptied, cut."""
    (bundle / name).write_bytes((bundle / name).read_bytes()[:keep])
    assert name in refusal(bundle)


def test_swapped_ranks_are_named(bundle: Path) -> None:
    """B09: both files are sound and of equal size; only what stands inside tells them apart."""
    a, b = bundle / "model.rank0.irpa", bundle / "model.rank1.irpa"
    contents = a.read_bytes(), b.read_bytes()
    assert len(contents[0]) == len(contents[1])
    a.write_bytes(contents[1])
    b.write_bytes(contents[0])
    message = refusal(bundle)
    assert "model.rank0.irpa" in message
    assert "tp=2, rank=0" in message
    assert "tp=2, rank=1" in message


def test_archives_of_another_tp_are_named(bundle: Path, tmp_path: Path) -> None:
    """B09: module and manifest of tp2, archives of tp3 and tp1."""
    other = publish_sample(tmp_path / "tp3", tp=3)
    shutil.copy(other / "model.rank1.irpa", bundle)
    message = refusal(bundle)
    assert "tp=2, rank=1" in message
    assert "the file holds model aaaaaaaaaaaa, tp=3, rank=1" in message
    alone = publish_sample(tmp_path / "tp1", tp=1)
    shutil.copy(alone / "model.irpa", bundle)
    assert "tp=1, shared" in refusal(bundle)


def test_archives_of_another_model_are_named(bundle: Path, tmp_path: Path) -> None:
    """F09: equal names, shapes and sizes; another checkpoint."""
    other = publish_sample(tmp_path / "other", digest="b" * 64)
    shutil.copy(other / "model.rank0.irpa", bundle)
    message = refusal(bundle)
    assert "model.rank0.irpa" in message
    assert "model aaaaaaaaaaaa" in message
    assert "model bbbbbbbbbbbb" in message


def test_a_changed_byte_is_found_by_digests_only(bundle: Path) -> None:
    (bundle / "model.vmfb").write_bytes(b"vmfB")
    assert open_bundle(bundle, runtime_version=RUNTIME)
    message = refusal(bundle, "digests")
    assert "model.vmfb has sha256" in message
    assert "instead of" in message


@pytest.mark.parametrize("running", ["3.12.9", "3.14.0rc20260101", "4.13.0"])
def test_another_iree_version_names_both_and_the_remedy(bundle: Path, running: str) -> None:
    """F07: refused at open, before anything is loaded."""
    with pytest.raises(VersionMismatchError) as caught:
        open_bundle(bundle, runtime_version=running)
    message = str(caught.value)
    assert "built with iree-base-compiler 3.13.0" in message
    assert f"iree-base-runtime {running} runs here" in message
    assert "rebuild it with shark-compile" in message
    assert "install iree-base-runtime 3.13" in message


def test_the_installed_runtime_is_what_counts_by_default(bundle: Path) -> None:
    edit_manifest(bundle, versions=VERSIONS | {"iree-base-compiler": "2.1.0"})
    with pytest.raises(VersionMismatchError, match=r"iree-base-compiler 2\.1\.0"):
        open_bundle(bundle)


def test_versions_that_are_not_there_are_asked_for() -> None:
    with pytest.raises(ArtifactError, match="does not say its iree-base-compiler version"):
        check_versions({}, runtime_version=RUNTIME)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tp": 3}, "tp 3 has model.irpa, model.rank0.irpa, model.rank1.irpa, model.rank2.irpa"),
        ({"module": "../model.vmfb"}, "reaches out of the bundle to ../model.vmfb"),
        ({"module": "/etc/passwd"}, "reaches out of the bundle to /etc/passwd"),
        ({"module": "other.vmfb"}, "does not list other.vmfb"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    bundle: Path, changes: dict[str, object], fault: str
) -> None:
    edit_manifest(bundle, **changes)
    assert fault in refusal(bundle)


def test_no_directory_and_no_bundle(tmp_path: Path) -> None:
    assert "no bundle at" in refusal(tmp_path / "nowhere")
    assert "no bundle at" in refusal(tmp_path)
    (tmp_path / "file").write_text("")
    assert "no bundle at" in refusal(tmp_path / "file")


def test_many_faults_are_cut_short(bundle: Path) -> None:
    for path in bundle.glob("model.*"):
        path.unlink()
    assert "model.rank1.irpa is missing; and 1 more; copy it again" in refusal(bundle)


def test_a_bundle_that_is_exchanged_while_checked_is_checked_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader beside a publisher: files of the old manifest vanish between two checks."""
    other = publish_sample(tmp_path / "other", tp=3, module=b"new")
    check = module._check_sizes

    def exchange_first(directory: Path, manifest: Manifest) -> None:
        if other.exists():
            bundle.rename(tmp_path / "away")
            other.rename(bundle)
        check(directory, manifest)

    monkeypatch.setattr(module, "_check_sizes", exchange_first)
    assert open_bundle(bundle, runtime_version=RUNTIME).manifest.tp == 3


def test_a_file_that_cannot_be_read_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(root: Path, names: object, progress: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(bundle / "model.vmfb"))

    monkeypatch.setattr(module, "digest_files", fail)
    assert "model.vmfb (Input/output error)" in refusal(bundle, "digests")
