"""The directory of dev artifacts: replaced as a whole, and only when all in it is our own.

build-report.json lists the files that belong to it and says which bundle they describe.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shark_llm.errors import CompileError, UsageError, VerificationError

REPORT_NAME = "build-report.json"
# compile-command.sh writes the module into the directory that it is called from: often this one.
_ALSO_OURS = frozenset({REPORT_NAME, "model.vmfb"})


def check_replaceable(dev_dir: Path) -> None:
    """Refuse a directory that holds anything a build did not write: nobody's work is deleted."""
    if not dev_dir.exists():
        return
    if not dev_dir.is_dir():
        raise UsageError(f"{dev_dir} is a file: give a directory for the dev artifacts")
    report = read_report(dev_dir)
    own = set(_ALSO_OURS) | set(report.get("files", {})) if report else set()
    foreign = (name for name in files_below(dev_dir) if name not in own)
    if named := list(itertools.islice(foreign, 3)):
        raise UsageError(
            f"{dev_dir} holds what no build has written "
            f"({', '.join(named)}): choose a new or empty directory, or move it away"
        )


def read_report(dev_dir: Path) -> dict[str, Any]:
    """build-report.json, or an empty dictionary where there is none that can be read."""
    try:
        report = json.loads((dev_dir / REPORT_NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) and isinstance(report.get("files"), dict) else {}


def describes(dev_dir: Path, manifest_digest: str, *, intermediates: bool) -> bool:
    """Whether all dev artifacts of the bundle with that manifest are there, made for this place.

    Flagfiles hold absolute paths: artifacts that were moved describe another place.
    """
    report = read_report(dev_dir)
    return (
        report.get("manifest_sha256") == manifest_digest
        and report.get("dev_dir") == str(dev_dir)
        and (not intermediates or report.get("intermediates") is True)
        and all(_size(dev_dir / name) == size for name, size in report["files"].items())
    )


def write_report(staging: Path, fields: dict[str, Any]) -> None:
    """build-report.json: `fields`, and the size of each file that `staging` holds."""
    sizes = {name: (staging / name).stat().st_size for name in files_below(staging)}
    text = json.dumps({**fields, "files": sizes}, indent=2)
    (staging / REPORT_NAME).write_text(text + "\n")


@contextmanager
def dev_staging(dev_dir: Path | None) -> Iterator[Path | None]:
    """A directory beside `dev_dir` that takes its place when the block ends normally.

    The bundle's lock is held meanwhile. Builds of different bundles that share one dev directory
    replace it one after the other, each as a whole.

    When the compiler or the golden check fails, what was written goes to `{dev_dir}.failed` instead
    and the error says so: it is what a compiler engineer needs then.
    """
    if dev_dir is None:
        yield None
        return
    dev_dir.parent.mkdir(parents=True, exist_ok=True)
    _remove_dead(dev_dir)
    staging = dev_dir.parent / f".{dev_dir.name}.partial-{os.getpid()}"
    old = staging.with_name(f".{dev_dir.name}.old-{os.getpid()}")
    staging.mkdir()
    try:
        try:
            yield staging
        except (CompileError, VerificationError) as error:
            kept = _keep_failed(staging, dev_dir)
            raise type(error)(f"{error}; source and command are kept in {kept}") from error
        check_replaceable(dev_dir)  # again: a minute has passed
        if dev_dir.exists():
            dev_dir.rename(old)
        staging.rename(dev_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def files_below(directory: Path) -> Iterator[str]:
    """Relative names of all files."""
    for path in sorted(directory.rglob("*")):
        if not path.is_dir() or path.is_symlink():
            yield path.relative_to(directory).as_posix()


def _keep_failed(staging: Path, dev_dir: Path) -> Path:
    """Publish what a failure is reproduced with beside `dev_dir`, which stays as it was."""
    kept = dev_dir.with_name(f"{dev_dir.name}.failed")
    check_replaceable(kept)
    write_report(staging, {})
    shutil.rmtree(kept, ignore_errors=True)
    staging.rename(kept)
    return kept


def _remove_dead(dev_dir: Path) -> None:
    """Remove what killed builds left beside `dev_dir`."""
    for kind in ("partial", "old"):
        prefix = f".{dev_dir.name}.{kind}-"
        for path in dev_dir.parent.iterdir():
            pid = path.name.removeprefix(prefix)
            if path.name.startswith(prefix) and pid.isdigit() and not _is_alive(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():  # a number that was used before: what it left is dead
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
