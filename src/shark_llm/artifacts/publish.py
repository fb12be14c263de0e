"""Publication of a bundle: wholly there or not there, whatever dies when.

    beside the target           what
    .{name}.lock                one publisher at a time; holds pid and host; gone when idle
    .{name}.partial-{token}/    the bundle being built, on the target's file system
    .{name}.old-{token}/        the old bundle, where the file system cannot exchange directories

The manifest is written last, when all other files are on the disk; then the directory is exchanged
for the old one in a single rename. What a killed publisher leaves behind is removed by the next
one, which can tell because it holds the lock.

Where the target is itself a mount point (or nothing may be created beside it), staging and lock
live inside the target under the name `.shark`, and the files are renamed one by one, the old
manifest going first and the new one coming last: in between there is no bundle, but never a mix.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shark_llm.artifacts.manifest import (
    MANIFEST_NAME,
    ByteProgress,
    FileInfo,
    Manifest,
    digest_files,
    encode_manifest,
)
from shark_llm.errors import CapacityError, UsageError

_POLL_SECONDS = 0.1
_UNWRITABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Staging:
    """A bundle in the making. Write its files below `path`, then call `seal` with the manifest."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self.target = target
        self.sealed = False

    def seal(self, manifest: Manifest, progress: ByteProgress | None = None) -> Manifest:
        """Digest every file below `path` into `manifest.files` and write manifest.json.

        All files reach the disk before the manifest does. Returns the completed manifest.
        """
        names = list(_files_below(self.path))
        files: dict[str, FileInfo] = digest_files(self.path, names, progress)
        missing = {manifest.module, *manifest.archives} - files.keys()
        assert not missing, f"the bundle lacks {missing}"
        manifest = manifest.model_copy(update={"files": files})
        for name in names:
            _sync(self.path / name)
        manifest_path = self.path / MANIFEST_NAME
        manifest_path.write_bytes(encode_manifest(manifest))
        _sync(manifest_path)
        for directory in [self.path, *(p for p in self.path.rglob("*") if p.is_dir())]:
            _sync(directory)
        self.sealed = True
        return manifest


@contextmanager
def publish(
    out_dir: Path, *, needed_bytes: int = 0, on_wait: Callable[[str], None] | None = None
) -> Iterator[Staging]:
    """Build a bundle for `out_dir` and put it there in one step.

    Another publisher of the same directory is waited for; `on_wait` is then told once who it is.
    The staged bundle replaces the old one when the block ends normally after `Staging.seal`; on any
    exception, or without seal, it is discarded and the old one stays.

    Raises UsageError when `out_dir` is not a directory, holds anything that is not part of a bundle
    (nothing of a user's is ever deleted), or cannot be written; CapacityError when the disk has
    less than `needed_bytes` free, or fills up inside the block.
    """
    target = out_dir.expanduser().resolve()
    place = _Place(target)
    written = free = 0  # when an error strikes
    try:
        place.home.mkdir(parents=True, exist_ok=True)
        with place.locked(on_wait):
            place.recover()
            place.check_replaceable()
            place.check_space(needed_bytes)
            staging = Staging(place.new_path("partial"), target)
            try:
                staging.path.mkdir()
                yield staging
                if staging.sealed:
                    place.check_replaceable()
                    place.swap(staging.path)
            except OSError:
                written = sum(path.lstat().st_blocks * 512 for path in staging.path.rglob("*"))
                free = _free_bytes(place.home)
                raise
            finally:
                shutil.rmtree(staging.path, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"no space left for {target}: it needs more than {max(needed_bytes, written)} "
                f"bytes, and {written + free} were free; nothing was changed: free some space or "
                "choose another directory"
            ) from error
        # What else the caller's block meets is not ours to explain.
        own = Path(error.filename or target).is_relative_to(target.parent)
        if own and error.errno in _UNWRITABLE:
            raise UsageError(
                f"cannot write {error.filename or target} ({error.strerror}): "
                "choose a directory that you may write to"
            ) from error
        raise


class _Place:
    """The target directory with the names that publication uses around it."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.in_place = target.is_dir() and _is_confined(target)
        self.home = target if self.in_place else target.parent
        self.prefix = ".shark" if self.in_place else f".{target.name}"
        self.lock_path = self.home / f"{self.prefix}.lock"
        self.swap_path = self.home / f"{self.prefix}.swap"  # in place: names of files in motion

    def new_path(self, kind: str) -> Path:
        return self.home / f"{self.prefix}.{kind}-{secrets.token_hex(4)}"

    @contextmanager
    def locked(self, on_wait: Callable[[str], None] | None) -> Iterator[None]:
        fd = self._acquire(on_wait)
        try:
            yield
        finally:
            try:
                # Removed while still held: waiters notice (see _acquire), and no file stays.
                self.lock_path.unlink(missing_ok=True)
            finally:
                os.close(fd)

    def _acquire(self, on_wait: Callable[[str], None] | None) -> int:
        told = False
        while True:
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder before us may have removed this very file: then it locks nobody out.
                if _same_file(fd, self.lock_path):
                    holder = f"pid {os.getpid()} on {socket.gethostname()}"
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, holder.encode(), 0)
                    return fd
            except BlockingIOError:
                holder = os.pread(fd, 256, 0).decode(errors="replace") or "another process"
                if on_wait is not None and not told:
                    on_wait(f"waiting for {holder}, which is publishing {self.target}")
                    told = True
                time.sleep(_POLL_SECONDS)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def recover(self) -> None:
        """Remove what dead publishers left; only for the holder of the lock."""
        if self.swap_path.exists():
            if not (self.target / MANIFEST_NAME).exists():
                self._remove_files(json.loads(self.swap_path.read_text()))
            self.swap_path.unlink()
        for old in self.home.glob(f"{_glob_escape(self.prefix)}.old-*"):
            if not self.target.exists() and _listed_files(old):
                old.rename(self.target)  # killed between the two renames of a swap
            else:
                shutil.rmtree(old)
        for partial in self.home.glob(f"{_glob_escape(self.prefix)}.partial-*"):
            shutil.rmtree(partial)

    def check_replaceable(self) -> None:
        """Refuse a target that holds anything but one bundle's own files."""
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise UsageError(f"{self.target} is a file: give a directory for the bundle")
        listed = _listed_files(self.target)
        own = (f"{self.prefix}.", "lost+found") if self.in_place else ()
        foreign = (
            name
            for name in _files_below(self.target)
            if name not in listed and not (own and name.startswith(own))
        )
        # A few are enough: the directory may be somebody's home.
        if named := list(itertools.islice(foreign, 3)):
            raise UsageError(
                f"{self.target} holds what is not part of a bundle and never deleted "
                f"({', '.join(named)}): choose a new or empty directory, or move it away"
            )

    def check_space(self, needed: int) -> None:
        free = _free_bytes(self.home)
        if needed > free:
            raise CapacityError(
                f"{self.target} needs {needed} bytes and {free} are free: "
                "free some space or choose another directory"
            )

    def swap(self, staged: Path) -> None:
        """Put `staged` in the target's place; a reader sees the old or the new, never a mix."""
        if self.in_place:
            self._swap_files(staged)
        elif not self.target.exists() or not any(self.target.iterdir()):
            staged.rename(self.target)
        elif not _exchange(staged, self.target):
            old = self.new_path("old")
            self.target.rename(old)
            staged.rename(self.target)
            shutil.rmtree(old)
        _sync(self.home)

    def _swap_files(self, staged: Path) -> None:
        new = set(_files_below(staged)) - {MANIFEST_NAME}
        old = _listed_files(self.target)
        draft = self.swap_path.with_suffix(".draft")
        draft.write_text(json.dumps(sorted(new | old)))
        _sync(draft)
        draft.rename(self.swap_path)
        (self.target / MANIFEST_NAME).unlink(missing_ok=True)
        _sync(self.target)
        self._remove_files(old - {MANIFEST_NAME})
        for name in [*sorted(new), MANIFEST_NAME]:
            (self.target / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).rename(self.target / name)
        _sync(self.target)
        self.swap_path.unlink()

    def _remove_files(self, names: set[str] | list[str]) -> None:
        for name in names:
            path = self.target / name
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self.target or not parent.is_dir() or any(parent.iterdir()):
                    break
                parent.rmdir()


def _listed_files(directory: Path) -> set[str]:
    """The files that belong to the bundle in `directory`, manifest included; empty: no bundle.

    Read leniently: a bundle of another schema version may be replaced too.
    """
    try:
        fields = json.loads((directory / MANIFEST_NAME).read_bytes())
        names = {str(name) for name in fields["files"]} if "schema_version" in fields else set()
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return set()
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
        return set()
    return names | {MANIFEST_NAME} if names else set()


def _files_below(directory: Path, prefix: str = "") -> Iterator[str]:
    """Relative names of all files, and of directories that have nothing in them."""
    for path in sorted(directory.iterdir()):
        name = prefix + path.name
        if path.is_dir() and not path.is_symlink() and any(path.iterdir()):
            yield from _files_below(path, f"{name}/")
        else:
            yield name


def _is_confined(target: Path) -> bool:
    """Whether nothing can be renamed over `target`."""
    return os.path.ismount(target) or not os.access(target.parent, os.W_OK)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories atomically. False where kernel or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library without it
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _glob_escape(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
