"""Digests of checkpoints that were read before, known again by sizes and times of their files.

{directory}/{sha256 of the paths}.json
    {"files": [[path, size, mtime, ctime, inode] ...], "digest": ...}

As rsync's quick check, and git's index: a file of the same size, times (in ns) and inode is taken
for unchanged. One that changed within a second before it was read is not remembered, since a second
change might show the same times.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shark_llm.artifacts.manifest import ByteProgress
from shark_llm.checkpoint.source import Checkpoint

_SETTLED_SECONDS = 1.0


def known_digest(directory: Path, checkpoint: Checkpoint) -> str | None:
    """The digest of a checkpoint whose files are as they were when it was computed."""
    try:
        known = json.loads(_memo(directory, checkpoint.weight_paths).read_text())
        if known["files"] == _stats(checkpoint.weight_paths):
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not known: it is read
    return None


def compute_digest(
    directory: Path | None, checkpoint: Checkpoint, progress: ByteProgress | None
) -> str:
    """Read the checkpoint; remember its digest in `directory`, as far as that can be written."""
    before, started = _stats(checkpoint.weight_paths), time.time()
    digest = checkpoint.digest(progress)
    settled = all(ctime < (started - _SETTLED_SECONDS) * 1e9 for *_, ctime, _ in before)
    if directory is None or not settled or _stats(checkpoint.weight_paths) != before:
        return digest
    memo = _memo(directory, checkpoint.weight_paths)
    partial = memo.with_name(f".{secrets.token_hex(4)}")
    with suppress(OSError):  # it only saves reading again
        directory.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"files": before, "digest": digest}))
        partial.replace(memo)
    return digest


def _memo(directory: Path, paths: Sequence[Path]) -> Path:
    names = "\0".join(str(path.resolve()) for path in paths)
    return directory / f"{hashlib.sha256(os.fsencode(names)).hexdigest()}.json"


def _stats(paths: Sequence[Path]) -> list[list[Any]]:
    """What a change would change, of each file."""
    found: list[list[Any]] = []
    for path in paths:
        stat = path.stat()
        found.append(
            [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        )
    return found
