"""The hub client's cache of one repository, read without the client and without the network.

models--{org}--{name}/refs/{revision}              text: the commit that a branch or tag means
                      snapshots/{commit}/{file}    links into blobs/
                      blobs/{etag}                 contents; {etag}.incomplete while being fetched
                      .no_exist/{commit}/{file}    empty: that commit has no such file
.locks/models--{org}--{name}/{etag}.lock           held while a blob is being fetched
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shark_llm.checkpoint.aux_files import AUX_NAMES, load_json
from shark_llm.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME
from shark_llm.errors import CheckpointError, HubError
from shark_llm.hub.location import COMMIT, is_inside

SMALL_FILES = (*AUX_NAMES, "special_tokens_map.json")
"""What is fetched beside the weights, where the repository has it."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class RepoCache:
    """Paths and contents of one repository's cache; only `write_ref` and `mark_absent` write."""

    def __init__(self, root: Path, repo_id: str) -> None:
        folder = "models--" + repo_id.replace("/", "--")
        self.root = root
        self.path = root / folder
        self.locks = root / ".locks" / folder

    def snapshot(self, commit: str) -> Path:
        return self.path / "snapshots" / commit

    def blob(self, etag: str) -> Path:
        return self.path / "blobs" / etag

    def lock(self, etag: str) -> Path:
        return self.locks / f"{etag}.lock"

    def commits(self) -> list[str]:
        """The commits of which there is at least one file."""
        snapshots = self.path / "snapshots"
        if not snapshots.is_dir():
            return []
        return sorted(entry.name for entry in snapshots.iterdir() if COMMIT.fullmatch(entry.name))

    def read_ref(self, revision: str) -> str | None:
        """The commit that `revision` means as far as the cache knows."""
        if COMMIT.fullmatch(revision):
            return revision
        ref = self.path / "refs" / revision
        commit = ref.read_text().strip() if ref.is_file() else ""
        return commit if COMMIT.fullmatch(commit) else None

    def write_ref(self, revision: str, commit: str) -> None:
        """Note what `revision` means now; done last, so that a ref never leads to a part."""
        if COMMIT.fullmatch(revision) or self.read_ref(revision) == commit:
            return
        ref = self.path / "refs" / revision
        partial = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        with self._as_far_as_writable():
            ref.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(commit)
            partial.replace(ref)

    def mark_absent(self, commit: str, name: str) -> None:
        """Note that the commit has no such file, which a cache without network cannot know."""
        marker = self.path / ".no_exist" / commit / name
        if not marker.exists():
            with self._as_far_as_writable():
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()

    @contextmanager
    def _as_far_as_writable(self) -> Iterator[None]:
        """A complete cache may be mounted read-only: notes in it only save a later question."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise HubError(f"{error.filename}: cannot be written: {error.strerror}") from error

    def unknown_small_files(self, commit: str) -> list[str]:
        """Small files that are neither cached nor known to be absent from the commit."""
        absent = self.path / ".no_exist" / commit
        return [
            name
            for name in SMALL_FILES
            if not (self.snapshot(commit) / name).is_file() and not (absent / name).exists()
        ]

    def missing_files(self, commit: str, gguf_file: str | None) -> list[str]:
        """What a build needs and the snapshot lacks, as far as its files tell."""
        snapshot = self.snapshot(commit)
        if gguf_file is not None:
            return [] if (snapshot / gguf_file).is_file() else [gguf_file]
        missing = [] if (snapshot / "config.json").is_file() else ["config.json"]
        if not (snapshot / INDEX_NAME).is_file() and not (snapshot / SINGLE_NAME).is_file():
            return [*missing, f"{INDEX_NAME} or {SINGLE_NAME}"]
        return missing + [
            name for name in weight_names(snapshot) if not (snapshot / name).is_file()
        ]


def weight_names(directory: Path) -> list[str]:
    """The weight files of a directory: those that its index names, else model.safetensors.

    They need not be there. Empty when there is neither. Raises CheckpointError for a bad index.
    """
    index = directory / INDEX_NAME
    if not index.is_file():
        return [SINGLE_NAME] if (directory / SINGLE_NAME).is_file() else []
    content = load_json(index, index.read_bytes())
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map, or an empty one: download it again")
    names = list(weight_map.values())
    bad = sorted({str(name) for name in names if not is_inside(name)})
    if bad:
        raise CheckpointError(f"{index}: names files outside its directory: {', '.join(bad)}")
    return sorted(set(names))


def read_config(directory: Path) -> Mapping[str, Any] | None:
    """config.json of a directory; None when there is none. Raises CheckpointError."""
    path = directory / "config.json"
    return read_config_file(path) if path.is_file() else None


def read_config_file(path: Path) -> Mapping[str, Any]:
    """The content of a config.json, whatever its name. Raises CheckpointError."""
    config = load_json(path, path.read_bytes())
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no JSON object: no model config")
    return config


def refuse_lfs_pointer(path: Path, name: str) -> None:
    """Refuse the three lines that Git LFS keeps in a file's place. Raises HubError."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise HubError(
                f"{name}: is a Git LFS pointer of {path.stat().st_size} bytes, not the file:"
                " upload the file itself, or use another copy of the model"
            )
