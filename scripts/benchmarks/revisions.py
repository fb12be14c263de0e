"""Another commit of this project as a side: its sources, its bundle and its worker, run with the
packages of this environment. Everything lies in .cache/bench/revisions."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import model as demo_model  # scripts/model.py: fetches the model that everything here uses

from benchmarks import peers
from benchmarks.results import OURS
from shark_llm.errors import UsageError

_DECISIVE = re.compile(r"^(?:iree-base-\w+|numpy|torch)==.*$", re.MULTILINE)
"""Pins that decide what is compiled and how fast it runs."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    """A commit whose files lie in `root`."""

    commit: str
    root: Path

    @property
    def side(self) -> str:
        """Its name in tables."""
        return f"{OURS} at {self.commit[:12]}"

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where its modules are found, before those that are installed."""
        return self.root / "scripts", self.root / "src"

    def bundle(self, dtype: str) -> Path:
        """The model as this commit compiles it, for the batches of `peers.bundle`."""
        demo_model.fetch()
        path = self.root.with_name(f"{self.root.name}-{dtype}")
        print(f"bench: shark-compile --dtype {dtype}, at {self.commit[:12]}", flush=True)
        command = peers.bench_command(dtype, path, path.with_name(f"{path.name}-dev"))
        peers.compile_bundle(command, paths=self.paths)
        return path


def check_out(asked: str) -> Revision:
    """The files of a commit, as `git` names it.

    Raises UsageError for one that git does not know, or that pins another compiler or runtime.
    """
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{asked}^{{commit}}")
    commit = found.stdout.decode().strip()
    if found.returncode != 0:
        raise UsageError(f"--against is {asked!r}, which is no commit of this repository")
    root = peers.CACHE / "revisions" / commit[:12]
    if not root.exists():
        archive = _git("archive", commit, "--", "src", "scripts", "constraints.txt")
        if archive.returncode != 0:
            raise UsageError(
                f"--against is {asked!r}: git cannot export it "
                f"({archive.stderr.decode(errors='replace').strip()[:200]})"
            )
        staged = root.with_name(f"{root.name}.part")
        shutil.rmtree(staged, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            peers.unpack(files, staged)
        staged.rename(root)
    theirs, ours = (
        set(_DECISIVE.findall((tree / "constraints.txt").read_text()))
        for tree in (root, peers.ROOT)
    )
    if theirs != ours:
        raise UsageError(
            f"--against is {asked!r}, which pins {', '.join(sorted(theirs - ours)) or 'less'}; "
            f"here {', '.join(sorted(ours - theirs)) or 'less'} is installed: compare commits with "
            "the same pins"
        )
    return Revision(commit=commit, root=root)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=peers.ROOT, capture_output=True)
