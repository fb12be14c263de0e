"""A published bundle, opened: everything that can be checked without a device has been.

checked                                     by
manifest.json, its schema version           read_manifest
IREE version built with / running here      check_versions
every file there, of the right size         sizes, at every open
model, tp and rank inside each archive      identity, at every open
every byte                                  digests, on demand
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shark_llm.artifacts.irpa import Identity, archive_name, archive_ranks, check_archive
from shark_llm.artifacts.manifest import (
    MANIFEST_NAME,
    ByteProgress,
    Manifest,
    digest_files,
    read_manifest,
)
from shark_llm.artifacts.publish import Staging, publish
from shark_llm.errors import ArtifactError, VersionMismatchError

__all__ = ["Bundle", "Staging", "check_versions", "open_bundle", "publish"]

_MAX_NAMED = 3  # files named in one message


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A directory whose files match its manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Where the file of that name in the manifest is."""
        return self.path / name

    @property
    def module(self) -> Path:
        return self.file(self.manifest.module)

    @property
    def archives(self) -> tuple[Path, ...]:
        """Of all ranks, model.irpa first."""
        return tuple(self.file(name) for name in self.manifest.archives)


def open_bundle(
    directory: Path,
    *,
    verify: Literal["sizes", "digests"] = "sizes",
    runtime_version: str | None = None,
    progress: ByteProgress | None = None,
) -> Bundle:
    """Open the bundle at `directory`, which may be a symlink or read-only.

    `verify` "digests" reads every byte, and tells `progress` how many. `runtime_version` is that of
    the installed iree-base-runtime unless given. Raises VersionMismatchError for another schema or
    IREE version, ArtifactError for anything missing, cut, changed or foreign, naming the file.
    """
    directory = directory.expanduser()
    while True:
        before = _inode(directory)
        try:
            bundle = _open(directory, verify, runtime_version, progress)
        except OSError as error:
            if _inode(directory) == before:
                raise _unreadable(error, directory) from error
        except ArtifactError:
            if _inode(directory) == before:
                raise
        else:
            if _inode(directory) == before:
                return bundle
        # A publisher exchanged the directory while it was being checked: check the new one.


def _inode(directory: Path) -> int:
    try:
        return directory.stat().st_ino
    except OSError as error:
        raise ArtifactError(
            f"no bundle at {directory} ({error.strerror}): "
            "check the path, or build it with shark-compile"
        ) from error


def check_versions(versions: dict[str, str], *, runtime_version: str | None = None) -> None:
    """Raise VersionMismatchError unless this runtime has the IREE version that built the module.

    Modules are compatible within one major.minor: both compiler and runtime must have it.
    """
    running = runtime_version or importlib.metadata.version("iree-base-runtime")
    for package in ("iree-base-compiler", "iree-base-runtime"):
        built = versions.get(package)
        if built is None:
            raise ArtifactError(f"the manifest does not say its {package} version: rebuild it")
        if _minor(built) != _minor(running):
            raise VersionMismatchError(
                f"the bundle was built with {package} {built}, and iree-base-runtime {running} "
                "runs here: rebuild it with shark-compile and iree-base-compiler "
                f"{_minor(running)}, or install iree-base-runtime {_minor(built)}"
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _open(
    directory: Path,
    verify: Literal["sizes", "digests"],
    runtime_version: str | None,
    progress: ByteProgress | None,
) -> Bundle:
    manifest = read_manifest(directory / MANIFEST_NAME)
    check_versions(manifest.versions, runtime_version=runtime_version)
    _check_names(directory, manifest)
    _check_presence(directory, manifest)
    _check_identities(directory, manifest)  # before sizes: "of tp 1" says more than a wrong size
    _check_sizes(directory, manifest)
    bundle = Bundle(path=directory, manifest=manifest)
    if verify == "digests":
        check_digests(bundle, progress)
    return bundle


def _check_names(directory: Path, manifest: Manifest) -> None:
    wanted = tuple(archive_name(rank) for rank in archive_ranks(manifest.tp))
    if manifest.archives != wanted:
        raise ArtifactError(
            f"{directory / MANIFEST_NAME} lists the archives {', '.join(manifest.archives)}; "
            f"tp {manifest.tp} has {', '.join(wanted)}; rebuild the bundle"
        )
    for name in (manifest.module, *manifest.archives, *manifest.files):
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or name not in manifest.files:
            fault = "does not list" if inside else "reaches out of the bundle to"
            raise ArtifactError(f"{directory / MANIFEST_NAME} {fault} {name}: rebuild the bundle")


def _check_presence(directory: Path, manifest: Manifest) -> None:
    missing = [name for name in manifest.files if not (directory / name).is_file()]
    _raise_if([f"{name} is missing" for name in sorted(missing)], directory)


def _check_sizes(directory: Path, manifest: Manifest) -> None:
    sizes = {name: (directory / name).stat().st_size for name in manifest.files}
    faults = [
        f"{name} has {sizes[name]} bytes instead of {info.size}"
        for name, info in sorted(manifest.files.items())
        if sizes[name] != info.size
    ]
    _raise_if(faults, directory)


def archive_identity(manifest: Manifest, rank: int | None) -> Identity:
    """What the archive of `rank` must say of itself."""
    return Identity(
        model=manifest.source.digest,
        tp=manifest.tp,
        rank=rank,
        dtype=manifest.dtype,
        weights_dtype=manifest.weights_dtype,
    )


def _check_identities(directory: Path, manifest: Manifest) -> None:
    for rank in archive_ranks(manifest.tp):
        expected = archive_identity(manifest, rank)
        check_archive(directory / archive_name(rank), expected)


def check_digests(bundle: Bundle, progress: ByteProgress | None = None) -> None:
    """Read every byte of an opened bundle, several files at a time, at the speed of the disk.

    Raises ArtifactError naming the files that cannot be read or are not as the manifest says.
    """
    wanted = bundle.manifest.files
    paths = {name: str(bundle.file(name).absolute()) for name in wanted}
    try:
        found = digest_files(Path("/"), paths.values(), progress)
    except OSError as error:
        raise _unreadable(error, bundle.path) from error
    faults = [
        f"{name} has sha256 {found[path].sha256[:12]}... instead of {wanted[name].sha256[:12]}..."
        for name, path in sorted(paths.items())
        if found[path] != wanted[name]
    ]
    _raise_if(faults, bundle.path)


def _unreadable(error: OSError, directory: Path) -> ArtifactError:
    return ArtifactError(
        f"cannot read {error.filename or directory} ({error.strerror}): "
        "copy the bundle again or rebuild it"
    )


def _raise_if(faults: list[str], directory: Path) -> None:
    if faults:
        more = f"; and {len(faults) - _MAX_NAMED} more" if len(faults) > _MAX_NAMED else ""
        raise ArtifactError(
            f"the bundle {directory} is damaged: {'; '.join(faults[:_MAX_NAMED])}{more}; "
            "copy it again or rebuild it"
        )
