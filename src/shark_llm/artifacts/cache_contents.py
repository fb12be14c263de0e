"""What the stage cache holds, and taking from it what nobody has used for long."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shark_llm.artifacts.manifest import MANIFEST_NAME, read_manifest
from shark_llm.artifacts.stage_cache import (
    BUNDLES_NAME,
    KINDS,
    SOURCES_NAME,
    directory_bytes,
    read_entry,
    remove_entry,
    remove_leftovers,
)
from shark_llm.errors import ArtifactError, UsageError

DAY_SECONDS = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class Content:
    """One entry, or one bundle of `shark-serve --model-path`."""

    kind: str
    """archives, modules or bundles."""
    path: Path
    what: str
    """Model, dtype, tp and target; or what is wrong with it."""
    sound: bool
    """Its entry.json or manifest can be read. Digests are compared at every use, not here."""
    num_bytes: int
    freed_bytes: int
    """Of disk when it goes: 0 for files that a bundle shares."""
    last_use: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What was removed, or would be."""

    contents: tuple[Content, ...]
    leftover_bytes: int
    """Of writers that were killed."""


def cache_contents(root: Path) -> list[Content]:
    """Everything in the cache, what was used last at the end. Reads no files but their heads."""
    contents = [_content(kind, path) for kind in KINDS for path in (root / kind).glob("[!.]*")] + [
        _content(BUNDLES_NAME, path) for path in (root / BUNDLES_NAME).glob("[!.]*/[!.]*")
    ]
    return sorted(contents, key=lambda content: (content.last_use, str(content.path)))


def prune(root: Path, *, unused_days: float, dry_run: bool) -> Pruned:
    """Remove what has not been used for `unused_days`, what cannot be read, and leftovers.

    A bundle that a server has loaded lives on until that server ends. Raises UsageError while a
    build is writing to the cache, and when the cache cannot be written.
    """
    before = time.time() - unused_days * DAY_SECONDS
    doomed = tuple(c for c in cache_contents(root) if c.last_use <= before or not c.sound)
    if dry_run or not root.is_dir():
        return Pruned(contents=doomed, leftover_bytes=0)
    try:
        fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftovers = remove_leftovers(root)
            for content in doomed:
                remove_entry(content.path)
                if content.kind == BUNDLES_NAME:
                    with suppress(OSError):  # of the model, when this was its last bundle
                        content.path.parent.rmdir()
            for memo in (root / SOURCES_NAME).glob("*"):  # some hundred bytes each
                if memo.stat().st_mtime <= before:
                    memo.unlink()
        finally:
            os.close(fd)
    except BlockingIOError as error:
        raise UsageError(
            f"a build is writing to the cache {root} just now: prune it when that is done"
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot prune the cache {root} ({error.strerror}): it must be writable"
        ) from error
    return Pruned(contents=doomed, leftover_bytes=leftovers)


def _content(kind: str, path: Path) -> Content:
    sound = True
    try:
        if kind == BUNDLES_NAME:
            manifest = read_manifest(path / MANIFEST_NAME)
            what = f"{manifest.source.name}, {manifest.precision}, tp {manifest.tp}, "
            what += manifest.target.name
        else:
            what = read_entry(path).what
    except (OSError, ValueError, ArtifactError):
        what, sound = "incomplete or damaged", False
    return Content(
        kind=kind,
        path=path,
        what=what,
        sound=sound,
        num_bytes=directory_bytes(path),
        freed_bytes=_freed_bytes(list(path.rglob("*"))),
        last_use=path.stat().st_mtime,
    )


def _freed_bytes(files: Sequence[Path]) -> int:
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            stat = file.lstat()
            total += stat.st_size if file.is_file() and stat.st_nlink == 1 else 0
    return total
