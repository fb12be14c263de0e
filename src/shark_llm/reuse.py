"""What an older bundle in the same place has already, so that it need not be made again.

    everything   the same model, settings and versions, golden check included: nothing to do
    archives     the same weights, dtype and plan: whatever the target or the entry points
    module       the same shapes, entry points, target and versions: whatever the weights

An old bundle counts only when every byte of it is as its manifest says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shark_llm.artifacts.bundle import Bundle, open_bundle
from shark_llm.artifacts.manifest import MANIFEST_NAME, Manifest, encode_manifest
from shark_llm.artifacts.publish import Staging
from shark_llm.errors import ArtifactError

# Of the model config: what the module does not depend on.
_NOT_IN_THE_MODULE = ("torch_dtype", "bos_token_id", "eos_token_ids", "architecture")
_MODULE_FIELDS = (
    "dtype",
    "kv_dtype",
    "tp",
    "plan",
    "page_size",
    "vocab_size",
    "entry_points",
    "caches",
    "parameter_scope",
    "target",
)
_MODULE_VERSIONS = ("shark-llm-source", "iree-base-compiler", "torch")


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What of `old` serves for the bundle that is asked for."""

    old: Bundle | None = None
    everything: bool = False
    archives: bool = False
    module: bool = False

    def __str__(self) -> str:
        if self.everything:
            return "everything is there"
        parts = [name for name in ("archives", "module") if getattr(self, name)]
        return f"{' and '.join(parts)} can be reused" if parts else "nothing to reuse"


def manifest_digest(directory: Path) -> str | None:
    """sha256 of the manifest in `directory`; None: there is none."""
    try:
        return hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
    except OSError:
        return None


def open_old(out_dir: Path, note: Callable[[str], None]) -> Bundle | None:
    """The bundle at `out_dir`, if there is a sound one."""
    if manifest_digest(out_dir) is None:
        return None
    try:
        return open_bundle(out_dir, verify="digests")
    except ArtifactError as error:
        note(f"the old bundle is not reused: {error}")
        return None


def find_reuse(
    old: Bundle | None,
    expected: Manifest,
    aux_files: Mapping[str, bytes],
    *,
    golden: bool,
) -> Reuse:
    """Compare `old` with what is expected.

    `aux_files` are the checkpoint's small files. `golden`: whether a golden check is part of what
    is asked for.
    """
    if old is None:
        return Reuse()
    # As it will be read back: JSON has lists where Python has tuples.
    expected = Manifest.model_validate_json(encode_manifest(expected))
    made: dict[str, object] = {"files": {}, "golden": None, "module_key": ""}
    same = old.manifest.model_copy(update=made) == expected.model_copy(update=made)
    return Reuse(
        old=old,
        everything=same
        and _same_aux_files(old.manifest, aux_files)
        and (old.manifest.golden is not None or not golden),
        archives=_same_archives(old.manifest, expected),
        module=_module_inputs(old.manifest) == _module_inputs(expected),
    )


def link_files(old: Bundle, staging: Staging, names: tuple[str, ...]) -> list[str]:
    """Hard links to files of the old bundle; copies where the file system has none."""
    for name in names:
        try:
            os.link(old.path / name, staging.path / name)
        except OSError:
            shutil.copyfile(old.path / name, staging.path / name)
    return list(names)


def check_linked(linked: list[str], old: Manifest, sealed: Manifest) -> None:
    """Raise ArtifactError if a linked file has changed since the old bundle was opened."""
    for name in linked:
        if old.files[name] != sealed.files[name]:
            raise ArtifactError(
                f"{name} of the old bundle has changed while it was reused: run the command again"
            )


def _same_archives(old: Manifest, expected: Manifest) -> bool:
    names = ("dtype", "tp", "plan", "weights", "archives")
    return old.source.digest == expected.source.digest and all(
        getattr(old, name) == getattr(expected, name) for name in names
    )


def _same_aux_files(old: Manifest, aux_files: Mapping[str, bytes]) -> bool:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in aux_files.items()}
    others = old.files.keys() - {old.module, *old.archives}
    return {name: old.files[name].sha256 for name in others} == digests


def _module_inputs(manifest: Manifest) -> list[Any]:
    """All that the exporter and the compiler are given."""
    shape = {k: v for k, v in manifest.config.items() if k not in _NOT_IN_THE_MODULE}
    versions = [manifest.versions.get(package) for package in _MODULE_VERSIONS]
    return [shape, versions, *(getattr(manifest, name) for name in _MODULE_FIELDS)]
