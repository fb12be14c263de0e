"""What is there already, so that it need not be made again: by an older bundle or by the cache.

    everything   the bundle in the same place has the same model, settings and versions, golden
                 check included: nothing to do
    archives     the same weights, dtype and plan: whatever the target or the entry points
    module       the same shapes, entry points, target and versions: whatever the weights

A part counts only when every byte of it is as its manifest says. The bundle as a whole may be taken
by its sizes, as a server does that loads it: where that is asked for, and nothing is made of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shark_llm.artifacts.bundle import Bundle, open_bundle
from shark_llm.artifacts.manifest import (
    MANIFEST_NAME,
    ByteProgress,
    FileInfo,
    Manifest,
    encode_manifest,
)
from shark_llm.artifacts.publish import Staging
from shark_llm.artifacts.stage_cache import Entry, Kind, StageCache, link_or_copy
from shark_llm.errors import ArtifactError

# Of the model config: what the module does not depend on.
_NOT_IN_THE_MODULE = ("torch_dtype", "bos_token_id", "eos_token_ids", "architecture")
_MODULE_FIELDS = (
    "dtype",
    "weights_dtype",
    "kv_dtype",
    "tp",
    "plan",
    "page_size",
    "vocab_size",
    "entry_points",
    "softmax_sums",
    "caches",
    "parameter_scope",
    "target",
)
_MODULE_VERSIONS = ("shark-llm-source", "iree-base-compiler", "torch")
_ARCHIVE_FIELDS = ("dtype", "weights_dtype", "tp", "plan", "weights", "archives")
_ARCHIVE_VERSIONS = ("shark-llm-weights-source",)

Where = Literal["old bundle", "cache"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Files of one stage that are there already."""

    path: Path
    files: Mapping[str, FileInfo]
    where: Where
    module_key: str = ""

    def note(self) -> str:
        """For the stage that need not run."""
        return "reused" if self.where == "old bundle" else "reused from the cache"


@dataclass(frozen=True, kw_only=True)
class Force:
    """Which stages run whatever is there already."""

    archives: bool = False
    export: bool = False
    compile: bool = False

    @property
    def any(self) -> bool:
        return self.archives or self.export or self.compile


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What of an older bundle and of the cache serves for the bundle that is asked for."""

    old: Bundle | None = None
    everything: bool = False
    """`old` is what was asked for."""
    archives: Part | None = None
    module: Part | None = None

    def __str__(self) -> str:
        if self.everything:
            return "everything is there"
        parts = [
            name if part.where == "old bundle" else f"{name} (from the cache)"
            for name, part in (("archives", self.archives), ("module", self.module))
            if part is not None
        ]
        return f"{' and '.join(parts)} can be reused" if parts else "nothing to reuse"


def manifest_digest(directory: Path) -> str | None:
    """sha256 of the manifest in `directory`; None: there is none."""
    try:
        return hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
    except OSError:
        return None


def open_old(
    out_dir: Path,
    note: Callable[[str], None],
    *,
    verify: Literal["sizes", "digests"],
    progress: ByteProgress | None = None,
) -> Bundle | None:
    """The bundle at `out_dir`, if there is a sound one."""
    if manifest_digest(out_dir) is None:
        return None
    try:
        return open_bundle(out_dir, verify=verify, progress=progress)
    except ArtifactError as error:
        note(f"the old bundle is not reused: {error}")
        return None


def find_reuse(
    old: Bundle | None,
    expected: Manifest,
    aux_files: Mapping[str, bytes],
    *,
    golden: bool,
    force: Force,
    cache: StageCache,
    progress: ByteProgress | None = None,
) -> Reuse:
    """Compare `old` and the cache with what is expected.

    `aux_files` are the checkpoint's small files. `golden`: whether a golden check is part of what
    is asked for.
    """
    expected = Manifest.model_validate_json(encode_manifest(expected))
    if old is not None and is_all(old, expected, aux_files, golden, force):
        return Reuse(
            old=old,
            everything=True,
            archives=old_part(old, expected.archives),
            module=old_part(old, (expected.module,)),
        )

    def find(kind: Kind, key_of: Callable[[Manifest], str], names: tuple[str, ...]) -> Part | None:
        key = key_of(expected)
        if old is not None and key_of(old.manifest) == key:
            return old_part(old, names)
        cached = cache.find(kind, key, progress)
        if cached is None or not set(names) <= cached.entry.files.keys():
            return None
        entry = cached.entry
        return Part(path=cached.path, files=entry.files, where="cache", module_key=entry.module_key)

    return Reuse(
        old=old,
        archives=None if force.archives else find("archives", archives_key, expected.archives),
        module=None if force.compile else find("modules", module_inputs_key, (expected.module,)),
    )


def old_part(old: Bundle, names: tuple[str, ...]) -> Part:
    """Files of the bundle in the same place."""
    return Part(
        path=old.path,
        files={name: old.manifest.files[name] for name in names},
        where="old bundle",
        module_key=old.manifest.module_key,
    )


def link_files(part: Part, staging: Staging, names: tuple[str, ...]) -> bool:
    """Links or copies of a part's files; False: one of them has gone in the meantime."""
    try:
        for name in names:
            link_or_copy(part.path / name, staging.path / name)
    except FileNotFoundError:  # somebody pruned the cache
        for name in names:
            (staging.path / name).unlink(missing_ok=True)
        return False
    return True


def check_linked(linked: Mapping[str, FileInfo], sealed: Manifest) -> None:
    """Raise ArtifactError if a linked file has changed since it was checked."""
    for name, info in linked.items():
        if info != sealed.files[name]:
            raise ArtifactError(f"{name} has changed while it was reused: run the command again")


def keep_parts(cache: StageCache, manifest: Manifest, directory: Path, *, replace: bool) -> None:
    """Put the archives and the module of a sealed bundle into the cache."""
    # As it is read from the file: keys are of that form.
    manifest = Manifest.model_validate_json(encode_manifest(manifest))
    of_model = f"{manifest.source.name}, {manifest.precision}, tp {manifest.tp}"
    archives = Entry(
        key=archives_key(manifest),
        source=manifest.source,
        weights=manifest.weights,
        what=of_model,
        files={name: manifest.files[name] for name in manifest.archives},
    )
    module = Entry(
        key=module_inputs_key(manifest),
        source=manifest.source,
        weights=manifest.weights,
        what=f"{of_model}, {manifest.target.name}",
        module_key=manifest.module_key,
        files={manifest.module: manifest.files[manifest.module]},
    )
    cache.put("archives", archives, directory, replace=replace)
    cache.put("modules", module, directory, replace=replace)


def archives_key(manifest: Manifest) -> str:
    """Of all that the archives depend on: the checkpoint's content, and how it is split."""
    versions = [manifest.versions.get(name) for name in _ARCHIVE_VERSIONS]
    fields = manifest.model_dump(mode="json", include=set(_ARCHIVE_FIELDS))
    return _key([manifest.source.digest, versions, fields])


def module_inputs_key(manifest: Manifest) -> str:
    """Of all that the exporter and the compiler are given."""
    shape = {k: v for k, v in manifest.config.items() if k not in _NOT_IN_THE_MODULE}
    versions = [manifest.versions.get(package) for package in _MODULE_VERSIONS]
    fields = manifest.model_dump(mode="json", include=set(_MODULE_FIELDS))
    return _key([shape, versions, fields])


def _key(inputs: Any) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def is_all(
    old: Bundle | None,
    expected: Manifest,
    aux_files: Mapping[str, bytes],
    golden: bool,
    force: Force,
) -> bool:
    """Whether `old` is just what is expected, and as well checked, and no stage is forced."""
    if old is None or force.any:
        return False
    # As it will be read back: JSON has lists where Python has tuples.
    expected = Manifest.model_validate_json(encode_manifest(expected))
    made: dict[str, object] = {"files": {}, "golden": None, "module_key": ""}
    return (
        old.manifest.model_copy(update=made) == expected.model_copy(update=made)
        and _same_aux_files(old.manifest, aux_files)
        and (old.manifest.golden is not None or not golden)
    )


def _same_aux_files(old: Manifest, aux_files: Mapping[str, bytes]) -> bool:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in aux_files.items()}
    others = old.files.keys() - {old.module, *old.archives}
    return {name: old.files[name].sha256 for name in others} == digests
