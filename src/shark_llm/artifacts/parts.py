"""A bundle taken apart: its files given one by one, wherever they lie and whatever they are called.

    model_config     the bundle's manifest.json: entry points, shapes and all that is expected
    vmfb             the module
    parameters       the archives of all ranks, in any order: each says itself which it is
    tokenizer_json   tokenizer.json; the other small files of the manifest lie beside it

All of them are checked against the manifest as those of a whole bundle are; the small files by
digest, since a tokenizer of another model has no identity and would only answer with noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shark_llm.artifacts.bundle import Bundle, archive_identity, check_versions
from shark_llm.artifacts.irpa import (
    ArchiveReader,
    archive_name,
    archive_ranks,
    check_archive,
)
from shark_llm.artifacts.manifest import Manifest, digest_files, read_manifest
from shark_llm.errors import ArtifactError

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "config.json"  # of the checkpoint: the manifest has what serving needs of it


@dataclass(frozen=True, kw_only=True)
class Parts(Bundle):
    """A bundle whose files are where `files` says; `path` is the directory of the small ones."""

    files: Mapping[str, Path]

    def file(self, name: str) -> Path:
        return self.files[name]


def open_parts(
    *,
    tokenizer_json: Path,
    model_config: Path,
    vmfb: Path,
    parameters: Sequence[Path],
    runtime_version: str | None = None,
) -> Parts:
    """Open the parts. Raises ArtifactError naming the part and what it should be, and
    VersionMismatchError as `open_bundle` does."""
    tokenizer_json, model_config, vmfb = (
        path.expanduser() for path in (tokenizer_json, model_config, vmfb)
    )
    manifest = _read(model_config)
    check_versions(manifest.versions, runtime_version=runtime_version)
    files = {manifest.module: vmfb} | _archives(manifest, [p.expanduser() for p in parameters])
    _check_sizes(manifest, files)
    small = _small_files(manifest, tokenizer_json)
    listed = {name: info for name, info in manifest.files.items() if name != CONFIG_NAME}
    return Parts(
        path=tokenizer_json.parent,
        manifest=manifest.model_copy(update={"files": listed}),
        files=files | small,
    )


def _read(model_config: Path) -> Manifest:
    try:
        fields = json.loads(model_config.read_bytes())
    except (OSError, ValueError):
        fields = None  # read_manifest says what is wrong with it
    if isinstance(fields, dict) and "schema_version" not in fields and "architectures" in fields:
        raise ArtifactError(
            f"--model-config {model_config} is the config.json of a checkpoint, which says nothing "
            "of entry points and shards: give the manifest.json that shark-compile wrote"
        )
    return read_manifest(model_config)


def _archives(manifest: Manifest, paths: Sequence[Path]) -> dict[str, Path]:
    """Archive name -> path, by what each archive says of itself."""
    found: dict[str, Path] = {}
    for path in paths:
        identity = ArchiveReader(path).identity
        rank = None if identity is None else identity.rank
        expected = archive_identity(manifest, rank)
        check_archive(path, expected)
        name = archive_name(rank)
        if name in found:
            raise ArtifactError(
                f"--parameters {found[name]} and {path} are both {expected}: give each file once"
            )
        found[name] = path
    wanted = [archive_name(rank) for rank in archive_ranks(manifest.tp)]
    if missing := [name for name in wanted if name not in found]:
        raise ArtifactError(
            f"--parameters lacks {', '.join(missing)}: tp {manifest.tp} needs {', '.join(wanted)}"
        )
    return {name: found[name] for name in wanted}


def _check_sizes(manifest: Manifest, files: Mapping[str, Path]) -> None:
    for name, path in files.items():
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ArtifactError(
                f"cannot read {path} ({error.strerror}): check the path of {name}"
            ) from error
        if size != manifest.files[name].size:
            raise ArtifactError(
                f"{path} has {size} bytes, {name} of this manifest has {manifest.files[name].size}:"
                " give the files of one and the same bundle"
            )


def _small_files(manifest: Manifest, tokenizer_json: Path) -> dict[str, Path]:
    """The tokenizer and what the manifest lists beside it."""
    if tokenizer_json.name != TOKENIZER_NAME:
        raise ArtifactError(
            f"--tokenizer-json {tokenizer_json}: the file must be called {TOKENIZER_NAME}, with "
            "tokenizer_config.json and the like beside it"
        )
    big = {manifest.module, *manifest.archives, CONFIG_NAME}
    names = [name for name in manifest.files if name not in big]
    directory = tokenizer_json.parent
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ArtifactError(
            f"{directory} lacks {', '.join(missing)}, which the manifest lists: put the small files"
            f" of the bundle beside {TOKENIZER_NAME}"
        )
    found = digest_files(directory, names)
    if foreign := [name for name in names if found[name] != manifest.files[name]]:
        raise ArtifactError(
            f"{directory}: {', '.join(foreign)} differs from what the manifest lists: give the "
            "files of one and the same bundle"
        )
    return {name: directory / name for name in names}
