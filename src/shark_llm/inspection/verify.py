"""Everything about a bundle that can be checked here, as a table of checks that says what failed.

Other than `open_bundle`, which stops at the first fault, this goes on: a damaged copy is described
as a whole. Imports torch only for the golden check.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shark_llm import __version__
from shark_llm.artifacts.bundle import Bundle, archive_identity, check_versions
from shark_llm.artifacts.cpu import missing_cpu_features
from shark_llm.artifacts.irpa import archive_name, archive_ranks, check_archive
from shark_llm.artifacts.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    ByteProgress,
    FileInfo,
    Manifest,
    digest_files,
    read_manifest,
)
from shark_llm.errors import ArtifactError, SharkError
from shark_llm.golden_run import run_golden_of_bundle, why_not_here

Status = Literal["ok", "FAILED", "skipped", "note"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table. `note`: nothing is wrong with the bundle, but a user should know."""

    name: str
    status: Status
    detail: str


def verify_bundle(
    directory: Path, *, digests: bool, golden: bool, progress: ByteProgress | None = None
) -> Iterator[Check]:
    """The checks one after the other; slow ones last.

    `digests` reads every byte, several files at a time, and tells `progress`; `golden` runs the
    module beside the eager model where that works.
    """
    directory = directory.expanduser()
    try:
        manifest = read_manifest(directory / MANIFEST_NAME)
    except ArtifactError as error:
        yield _failed("manifest", error)
        return
    yield _ok("manifest", f"schema version {manifest.schema_version} of {SCHEMA_VERSION}")
    yield from _versions(manifest)
    yield _target(manifest)
    sound = True
    for check in (
        *_identities(directory, manifest),
        *_files(directory, manifest, digests, progress),
    ):
        sound = sound and check.status != "FAILED"
        yield check
    yield from _surplus(directory, manifest)
    if not golden:
        yield _skipped("golden check", "--no-golden")
    elif not sound:
        yield _skipped("golden check", "the bundle is damaged")
    else:
        yield _golden(directory, manifest)


def _versions(manifest: Manifest) -> Iterator[Check]:
    try:
        running = importlib.metadata.version("iree-base-runtime")
        check_versions(manifest.versions, runtime_version=running)
    except ArtifactError as error:
        yield _failed("IREE version", error)
    else:
        built = manifest.versions["iree-base-compiler"]
        yield _ok("IREE version", f"built with {built}, {running} runs here")
    built = manifest.versions.get("shark-llm", "unknown")
    status: Status = "ok" if built == __version__ else "note"
    detail = f"built with {built}, {__version__} runs here"
    yield Check(name="shark-llm version", status=status, detail=detail)


def _target(manifest: Manifest) -> Check:
    target = manifest.target
    if target.driver != "local-task":
        detail = f"{target.name} needs a {target.driver} device: not looked for here"
        return Check(name="target", status="skipped", detail=detail)
    if missing := missing_cpu_features(target.cpu_features):
        detail = f"{target.name}: this CPU lacks {' '.join(missing)} and cannot serve it"
        return Check(name="target", status="note", detail=detail)
    return _ok("target", f"{target.name}: this CPU has what it needs")


def _identities(directory: Path, manifest: Manifest) -> Iterator[Check]:
    wanted = tuple(archive_name(rank) for rank in archive_ranks(manifest.tp))
    if manifest.archives != wanted:
        found = ", ".join(manifest.archives)
        error = ArtifactError(f"lists {found}; tp {manifest.tp} has {', '.join(wanted)}")
        yield _failed("archives", error)
        return
    for rank in archive_ranks(manifest.tp):
        name = archive_name(rank)
        identity = archive_identity(manifest, rank)
        try:
            check_archive(directory / name, identity)
        except ArtifactError as error:
            yield _failed(f"{name} identity", error)
        else:
            yield _ok(f"{name} identity", str(identity))


def _files(
    directory: Path, manifest: Manifest, digests: bool, progress: ByteProgress | None
) -> Iterator[Check]:
    unlisted = {manifest.module, *manifest.archives} - manifest.files.keys()
    for name in sorted(unlisted):
        yield Check(name=name, status="FAILED", detail="not in the manifest's list of files")
    checks: dict[str, Check] = {}
    for name, info in manifest.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            checks[name] = Check(name=name, status="FAILED", detail="reaches out of the bundle")
        else:
            checks[name] = _size(directory, name, info)
    if digests:
        sound = [name for name, check in checks.items() if check.status == "ok"]
        checks |= _digests(directory, manifest, sound, progress)
    for name in sorted(checks):
        yield checks[name]


def _size(directory: Path, name: str, info: FileInfo) -> Check:
    try:
        size = (directory / name).stat().st_size
    except OSError as error:
        return Check(name=name, status="FAILED", detail=error.strerror or str(error))
    if size != info.size:
        detail = f"has {size} bytes instead of {info.size}"
        return Check(name=name, status="FAILED", detail=detail)
    return _ok(name, f"{size} bytes")


def _digests(
    directory: Path, manifest: Manifest, names: list[str], progress: ByteProgress | None
) -> dict[str, Check]:
    try:
        found = digest_files(directory, names, progress)
    except OSError as error:
        where = Path(error.filename or directory).name
        return {where: Check(name=where, status="FAILED", detail=error.strerror or str(error))}
    checks = {}
    for name, info in found.items():
        wanted = manifest.files[name].sha256
        if info.sha256 == wanted:
            checks[name] = _ok(name, f"{info.size} bytes, sha256 {info.sha256}")
        else:
            detail = f"has sha256 {info.sha256} instead of {wanted}"
            checks[name] = Check(name=name, status="FAILED", detail=detail)
    return checks


def _surplus(directory: Path, manifest: Manifest) -> Iterator[Check]:
    for path in sorted(directory.iterdir()):
        known = {MANIFEST_NAME, *(Path(name).parts[0] for name in manifest.files)}
        if path.name not in known:
            yield Check(name=path.name, status="note", detail="is not part of the bundle")


def _golden(directory: Path, manifest: Manifest) -> Check:
    size = sum(manifest.files[name].size for name in manifest.archives)
    if why := why_not_here(manifest, size):
        return _skipped("golden check", why)
    try:
        report = run_golden_of_bundle(Bundle(path=directory, manifest=manifest))
    except SharkError as error:
        return _failed("golden check", error)
    detail = (
        f"largest error {report.max_abs_error:.2g} of {report.tolerance:.2g} allowed, "
        f"{report.prompt_tokens} prompt tokens, {report.decode_steps} decode steps"
    )
    return _ok("golden check", detail)


def _ok(name: str, detail: str) -> Check:
    return Check(name=name, status="ok", detail=detail)


def _skipped(name: str, detail: str) -> Check:
    return Check(name=name, status="skipped", detail=detail)


def _failed(name: str, error: Exception) -> Check:
    return Check(name=name, status="FAILED", detail=str(error))
