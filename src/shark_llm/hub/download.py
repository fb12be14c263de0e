"""Fetching the files of one commit into the cache: resumed, in parallel, checked before they count.

A blob gets its name only when its size and digest are right, and a snapshot its link only after
that: whatever a kill leaves behind is `{etag}.incomplete`, which the next run continues.
"""

from __future__ import annotations

import concurrent.futures
import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from shark_llm.errors import CapacityError, HubError
from shark_llm.hub.cache import RepoCache, refuse_lfs_pointer
from shark_llm.hub.client import HubClient, RemoteFile, UnreachableError

LFS_POINTER_MAX_BYTES = 1024
_SAFE_NAME = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), in the caller's thread, about ten times a second. What an
earlier run left counts as done from the start; done falls when a file has to begin again."""


class _CancelledError(Exception):
    """Another file failed, or the user gave up: stop, and keep what is there."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def is_cached(cache: RepoCache, commit: str, file: RemoteFile) -> bool:
    """Whether the snapshot has the file, whole as far as its size tells."""
    path = cache.snapshot(commit) / file.name
    return path.is_file() and file.num_bytes in (None, path.stat().st_size)


def fetch_files(
    client: HubClient,
    cache: RepoCache,
    commit: str,
    files: Sequence[RemoteFile],
    *,
    parallel_files: int,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> None:
    """Bring `files` (of known size and etag) into the snapshot of `commit`.

    `force` fetches those that are there, too, from their first byte. The first failure stops all,
    and what has arrived stays for the next run. Raises HubError, and CapacityError when the disk is
    too small or full.
    """
    total = sum(file.num_bytes or 0 for file in files)
    tally = _Tally()
    missing = [file for file in files if force or not is_cached(cache, commit, file)]
    tally.add(total - sum(file.num_bytes or 0 for file in missing))
    _check_space(cache, missing, force)
    cancelled = threading.Event()

    def fetch(file: RemoteFile) -> None:
        _Download(client, cache, commit, file, tally, cancelled, force).run()

    with concurrent.futures.ThreadPoolExecutor(parallel_files) as pool:
        pending = {pool.submit(fetch, file) for file in missing}
        try:
            while pending:
                done, pending = concurrent.futures.wait(
                    pending, timeout=0.1, return_when=concurrent.futures.FIRST_EXCEPTION
                )
                for future in done:
                    future.result()
                if progress is not None and pending:
                    progress(tally.done, total)
        except BaseException:
            # Also for Ctrl-C: the pool waits for its threads, which look at this with every chunk.
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if progress is not None:
        progress(total, total)


class _Tally:
    """Bytes done by all threads together."""

    def __init__(self) -> None:
        self.done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes


class _Download:
    """One file on its way into the cache."""

    def __init__(
        self,
        client: HubClient,
        cache: RepoCache,
        commit: str,
        file: RemoteFile,
        tally: _Tally,
        cancelled: threading.Event,
        force: bool,
    ) -> None:
        assert file.num_bytes is not None, file
        assert file.etag is not None, file
        if _SAFE_NAME.fullmatch(file.etag) is None:
            raise HubError(f"{file.name}: the hub names it by the ETag {file.etag!r}: is it a hub?")
        self._client, self._commit, self._name = client, commit, file.name
        self._size, self._etag = file.num_bytes, file.etag
        self._tally, self._cancelled, self._force = tally, cancelled, force
        self._link = cache.snapshot(commit) / file.name
        self._blob = cache.blob(file.etag)
        self._partial = self._blob.with_name(f"{self._blob.name}.incomplete")
        self._lock_path = cache.lock(file.etag)

    def run(self) -> None:
        with _readable_os_errors(self._partial, self._size):
            for path in (self._blob, self._link, self._lock_path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if self._is_whole(self._blob) and not self._force:
                    self._tally.add(self._size)
                else:
                    self._fetch()
                self._publish()

    def _is_whole(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_size == self._size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that the hub's own client takes for this blob, too."""
        lock = FileLock(self._lock_path, mode=0o664)
        while True:
            self._stop_if_cancelled()
            try:
                lock.acquire(timeout=0.5)
                break
            except Timeout:
                continue
        try:
            yield
        finally:
            lock.release()

    def _stop_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _CancelledError(self._name)

    def _fetch(self) -> None:
        """Complete the partial file, and check it. One that an earlier run began may be bad."""
        if self._force:
            self._partial.unlink(missing_ok=True)
        else:
            self._blob.unlink(missing_ok=True)
        resumed = self._partial.exists() and self._partial.stat().st_size > 0
        found = self._complete_partial()
        if not self._is_right(found) and resumed:
            self._tally.add(-self._size)
            self._partial.unlink()
            found = self._complete_partial()
        if self._size <= LFS_POINTER_MAX_BYTES:
            refuse_lfs_pointer(self._partial, self._name)
        if not self._is_right(found):
            self._partial.unlink()
            raise HubError(
                f"{self._name}: arrived with digest {found}, but the hub says {self._etag}: it was"
                " damaged on its way or is damaged there; run the command again"
            )
        self._partial.replace(self._blob)

    def _is_right(self, found: str | None) -> bool:
        return found is None or found == self._etag

    def _complete_partial(self) -> str | None:
        """Append what is missing. Returns the digest of the whole; None: the etag is no digest."""
        # Unbuffered: a kill loses nothing that has arrived.
        with self._partial.open("ab+", buffering=0) as file:
            done, digest = self._prefix(file.fileno())
            furthest, fruitless = done, 0
            while done < self._size:
                try:
                    with self._client.read(
                        self._name, self._commit, start=done, num_bytes=self._size
                    ) as (begin, chunks):
                        if begin != done:  # ranges are ignored: all over again
                            self._tally.add(-done)
                            file.truncate(0)
                            done, digest = 0, _new_hash(self._etag, self._size)
                        for chunk in chunks:
                            self._stop_if_cancelled()
                            done += len(chunk)
                            if done > self._size:
                                raise HubError(
                                    f"{self._name}: the hub sends more than the {self._size} bytes"
                                    " that it lists: use another hub (HF_ENDPOINT)"
                                )
                            _write_all(file.fileno(), chunk)
                            digest.update(chunk)
                            self._tally.add(len(chunk))
                    if done <= furthest:
                        raise UnreachableError("the hub's answer brought nothing new")
                except UnreachableError as error:
                    fruitless = 0 if done > furthest else fruitless + 1
                    if done < self._size:
                        self._wait(fruitless, done, error)
                furthest = max(furthest, done)
            os.fsync(file.fileno())
        return digest.hexdigest() if _is_digest(self._etag) else None

    def _prefix(self, fd: int) -> tuple[int, _Hash]:
        """Size and running hash of what an earlier run left."""
        digest = _new_hash(self._etag, self._size)
        done = os.fstat(fd).st_size
        if done > self._size:
            os.ftruncate(fd, 0)
            done = 0
        position = 0
        while position < done:
            self._stop_if_cancelled()
            block = os.pread(fd, min(8 << 20, done - position), position)
            digest.update(block)
            position += len(block)
        self._tally.add(done)
        return done, digest

    def _wait(self, fruitless: int, done: int, reason: UnreachableError) -> None:
        delays = self._client.retry_delays_s
        if fruitless > len(delays) or not delays:
            raise HubError(
                f"{self._name}: the download stopped at {done} of {self._size} bytes: {reason};"
                " run the command again to go on from there"
            ) from reason
        delay = delays[max(fruitless, 1) - 1]
        self._cancelled.wait(max(delay, reason.retry_after_s or 0.0))
        self._stop_if_cancelled()

    def _publish(self) -> None:
        """Let the snapshot have the blob: as a link, or by moving it where there are no links."""
        from huggingface_hub import constants

        is_file = self._link.is_file() and not self._link.is_symlink()
        if self._is_whole(self._link) and not (self._force and is_file):
            return
        self._link.unlink(missing_ok=True)
        if not constants.HF_HUB_DISABLE_SYMLINKS:
            try:
                self._link.symlink_to(os.path.relpath(self._blob, self._link.parent))
                return
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                    raise
        self._blob.replace(self._link)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _is_digest(etag: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", etag) is not None


def _new_hash(etag: str, num_bytes: int) -> _Hash:
    """The hash whose result the etag should be: sha256 for LFS files, else git's for blobs."""
    if len(etag) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)


def _check_space(cache: RepoCache, missing: Sequence[RemoteFile], force: bool) -> None:
    needed = sum(file.num_bytes or 0 for file in missing)
    for file in () if force else missing:
        assert file.etag is not None, file
        for path in (cache.blob(file.etag), cache.blob(f"{file.etag}.incomplete")):
            if path.is_file():
                needed -= min(path.stat().st_size, file.num_bytes or 0)
                break
    there = next(path for path in (cache.path, *cache.path.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CapacityError(
            f"{cache.path}: the download needs {needed} more bytes, and {free} are free on that"
            " disk: make room, or name another place with --hf-cache-dir"
        )


@contextmanager
def _readable_os_errors(partial: Path, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(partial.parent).free
            raise CapacityError(
                f"{partial}: the disk is full ({free} bytes free, the file has {num_bytes}): make"
                " room and run the command again to go on, or use --hf-cache-dir"
            ) from error
        raise HubError(
            f"{error.filename or partial}: {error.strerror or error}: the cache must be writable"
            " to fetch into it; see its rights, or use --hf-cache-dir"
        ) from error
