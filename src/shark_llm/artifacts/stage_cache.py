"""What the stages of builds have made, kept for builds into other directories.

    {root}/archives/{key}/           entry.json, model.irpa, model.rank{r}.irpa
           modules/{key}/            entry.json, model.vmfb
           bundles/{model}/{key}/    the bundles of `shark-serve --model-path`
           sources/                  digests of local checkpoints (checkpoint.known_digests)
           .lock                     held shared while an entry is put, exclusively by cleaners

A key is the digest of all that a stage's result depends on. Files are hard links to those of the
bundle they came from; copies where the file system has no such links, or the bundle is on another
one. An entry gets its name when it is whole, and counts only if every byte of it is as its
entry.json says: one that is not is removed, and the stage runs. The time of the last use is the
modification time of the entry's directory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import ValidationError

from shark_llm.artifacts.manifest import (
    ByteProgress,
    FileInfo,
    Frozen,
    Source,
    digest_files,
)

CachePolicy = Literal["on", "off", "redo", "readonly"]
"""on: use what is there and keep what is made. off: neither. redo: make everything anew and keep
it. readonly: use what is there and keep nothing."""
CACHE_POLICIES: tuple[CachePolicy, ...] = get_args(CachePolicy)
Kind = Literal["archives", "modules"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CACHE_DIR_VARIABLE = "SHARK_CACHE_DIR"
ENTRY_NAME = "entry.json"
BUNDLES_NAME = "bundles"
SOURCES_NAME = "sources"

Note = Callable[[str], None]


def cache_root(given: Path | None) -> Path:
    """The cache's directory: as given, else SHARK_CACHE_DIR, else `shark` in the user's caches."""
    if given is None:
        variable = os.environ.get(CACHE_DIR_VARIABLE)
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = Path(variable) if variable else Path(caches) / "shark"
    return given.expanduser().absolute()


class Entry(Frozen):
    """entry.json."""

    schema_version: Literal[1] = 1
    key: str
    source: Source
    """Of whose build it came. A module serves other models of the same shape as well."""
    weights: Literal["checkpoint", "dummy"]
    what: str
    """For people: dtype, tp, target."""
    module_key: str = ""
    """`Manifest.module_key`; empty for archives."""
    files: dict[str, FileInfo]


@dataclass(frozen=True, kw_only=True)
class Cached:
    """An entry that is there."""

    path: Path
    entry: Entry


class StageCache:
    """The entries below one root. Faults of the cache are notes: a build does without it."""

    def __init__(self, root: Path, policy: CachePolicy, note: Note) -> None:
        self.root = root
        self.reads = policy in ("on", "readonly")
        self.writes = policy in ("on", "redo")
        self._note = note

    def find(self, kind: Kind, key: str, progress: ByteProgress | None = None) -> Cached | None:
        """The entry of that key, every byte of it checked; a damaged one is removed."""
        if not self.reads:
            return None
        path = self.root / kind / key
        try:
            entry = read_entry(path)
            fault = "its entry.json says another" if entry.key != key else ""
            if not fault and digest_files(path, entry.files, progress) != entry.files:
                fault = "its files are not as entry.json says"
        except FileNotFoundError as error:
            if not path.exists():
                return None
            fault = f"{error.filename} is missing"
        except (OSError, ValueError) as error:
            fault = f"it cannot be read ({getattr(error, 'strerror', None) or 'bad entry.json'})"
        if fault:
            self._note(f"the cached {kind} {path} are not used: {fault}")
            if self.writes:
                with suppress(OSError):
                    remove_entry(path)
            return None
        with suppress(OSError):  # a cache that is mounted read-only is used all the same
            os.utime(path)
        return Cached(path=path, entry=entry)

    def source_digest(self, name: str, revision: str, weights: str) -> str | None:
        """The digest of a commit's checkpoint, if archives of it are there."""
        for cached in self.entries("archives") if self.reads else ():
            source = cached.entry.source
            if (source.name, source.revision, cached.entry.weights) == (name, revision, weights):
                return source.digest
        return None

    @property
    def sources(self) -> Path:
        """The directory of known digests of checkpoints."""
        return self.root / SOURCES_NAME

    def has_entries(self) -> bool:
        """Whether there is anything to look for."""
        return self.reads and any(True for kind in KINDS for _ in self.entries(kind))

    def entries(self, kind: Kind) -> Iterator[Cached]:
        """Those whose entry.json can be read; nothing else of them is checked."""
        for path in sorted((self.root / kind).glob("[!.]*")):
            with suppress(OSError, ValueError):
                yield Cached(path=path, entry=read_entry(path))

    def put(self, kind: Kind, entry: Entry, directory: Path, *, replace: bool) -> None:
        """Keep `entry.files` of `directory`. An entry of that key stays unless `replace`."""
        path = self.root / kind / entry.key
        if not self.writes or (path.exists() and not replace):
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._writing():
                self._put(path, entry, directory)
        except OSError as error:
            self._note(
                f"{entry.what}: not kept in the cache {self.root}: {error.strerror or error}"
            )

    def _put(self, path: Path, entry: Entry, directory: Path) -> None:
        size = sum(info.size for info in entry.files.values())
        free = shutil.disk_usage(path.parent).free
        if directory.stat().st_dev != path.parent.stat().st_dev and size > free // 2:
            # Half of a disk is no small thing to fill for a cache that nobody may ever read.
            self._note(
                f"{entry.what}: not kept in the cache {self.root}, which is on another disk: a copy"
                f" takes {size} bytes, and {free} are free there; name one on the bundle's disk"
                " with --cache-dir"
            )
            return
        partial = path.with_name(f".partial-{secrets.token_hex(4)}")
        try:
            partial.mkdir()
            for name in entry.files:
                link_or_copy(directory / name, partial / name)
            _write_synced(partial / ENTRY_NAME, entry.model_dump_json(indent=2).encode())
            if path.exists():
                remove_entry(path)
            try:
                partial.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # else another build has put the same in between
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock that keeps cleaners out; when no other writer holds it, clean up first."""
        fd = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_leftovers(self.root)
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)


def read_entry(path: Path) -> Entry:
    """entry.json of a directory. Raises OSError and ValueError."""
    try:
        return Entry.model_validate(json.loads((path / ENTRY_NAME).read_bytes()))
    except ValidationError as error:
        raise ValueError("bad entry.json") from error


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link; a copy where the file system has none, which is on the disk on return."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def remove_leftovers(root: Path) -> int:
    """Remove what killed writers left; only for who holds the lock exclusively. Returns bytes."""
    removed = 0
    for pattern in (*(f"{kind}/.*-*" for kind in KINDS), f"{BUNDLES_NAME}/*/.removed-*"):
        for path in root.glob(pattern):
            removed += directory_bytes(path)
            shutil.rmtree(path, ignore_errors=True)
    return removed


def directory_bytes(path: Path) -> int:
    """Of all files below `path`, as far as they are still there."""
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def remove_entry(path: Path) -> None:
    """Take an entry or a bundle away in one step, so that nobody meets half of it."""
    doomed = path.with_name(f".removed-{secrets.token_hex(4)}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
