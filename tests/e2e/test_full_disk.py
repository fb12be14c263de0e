"""Real file systems of 1 MB, as output, as cache and as TMPDIR.

They are mounted in a mount namespace of the test's own process, where the kernel allows that to
everybody. Exporter and compiler are fakes; the module that the fake writes is of any size.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]

# argv: a directory, the case. Prints the error, the notes and what is on the small disk.
PROGRAM = """
import json, os, sys
from pathlib import Path

import pytest

import tiny
from build_harness import FakeCompileSide, ListReporter, settings
from bundles import publish_sample
from shark_llm import build_plan
from shark_llm.artifacts.manifest import digest_files, read_manifest
from shark_llm.build import build
from shark_llm.errors import SharkError

root, case = Path(sys.argv[1]), sys.argv[2]
small, patch = root / "small", pytest.MonkeyPatch()
side = FakeCompileSide.install(patch)
model, out, fields = tiny.write_tiny(root / "t0"), root / "bundle", {}
if case in ("output", "midway"):
    out = publish_sample(small / "bundle", module=b"old")
if case == "midway":  # as if the module were larger than anybody knew
    patch.setattr(build_plan, "MODULE_ALLOWANCE", 0)
    def write_much(source):
        (source.parent / "model.vmfb").write_bytes(bytes(2 << 20))
    side.on_compile = write_much
if case == "cache":
    fields["cache_dir"] = small / "cache"
    (small / "filler").write_bytes(bytes(600 << 10))
reporter, error = ListReporter(), None
try:
    build(settings(model, out, **fields), reporter)
except SharkError as caught:
    error = f"{type(caught).__name__}: {caught}"
manifest = read_manifest(out / "manifest.json")
print(json.dumps({
    "error": error,
    "notes": reporter.notes,
    "small": sorted(str(path.relative_to(small)) for path in small.rglob("*") if path.is_file()),
    "sound": digest_files(out, manifest.files) == manifest.files,
    "name": manifest.source.name,
}))
"""


@pytest.fixture(scope="module")
def unshare() -> list[str]:
    """The command that runs another with a mount namespace of its own."""
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"]).returncode:
        pytest.skip("mount namespaces are not allowed here")
    return command


def run(unshare: list[str], root: Path, case: str) -> dict[str, Any]:
    small = root / "small"
    small.mkdir()
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    if case == "tmpdir":
        env["TMPDIR"] = str(small)
    script = f'mount -t tmpfs -o size=1m tmpfs "{small}" && exec "$@"'
    command = [*unshare, "sh", "-c", script, "sh", sys.executable, "-c", PROGRAM, str(root), case]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


OLD = [f"bundle/{name}" for name in ("manifest.json", "model.irpa", "model.rank0.irpa")]
OLD += ["bundle/model.rank1.irpa", "bundle/model.vmfb"]


def test_what_cannot_fit_is_said_before_the_work(unshare: list[str], tmp_path: Path) -> None:
    """F06: needed and free; the old bundle stays."""
    found = run(unshare, tmp_path, "output")
    assert "CapacityError" in found["error"]
    assert "needs 67543040 bytes and " in found["error"]
    assert " are free" in found["error"]
    assert (found["small"], found["sound"], found["name"]) == (OLD, True, "tiny/t0")


def test_a_disk_that_fills_up_midway(unshare: list[str], tmp_path: Path) -> None:
    """F06: what was written is removed, needed and free are said, the old bundle stays."""
    found = run(unshare, tmp_path, "midway")
    assert "CapacityError: no space left for" in found["error"]
    assert "nothing was changed" in found["error"]
    assert (found["small"], found["sound"], found["name"]) == (OLD, True, "tiny/t0")


def test_a_full_disk_under_the_cache_fails_no_build(unshare: list[str], tmp_path: Path) -> None:
    """F06: the archive would take more than half of what is free; the module is kept."""
    found = run(unshare, tmp_path, "cache")
    assert (found["error"], found["sound"], found["name"]) == (None, True, "t0")
    (note,) = found["notes"]
    assert "t0, f32, tp 1: not kept in the cache" in note
    kinds = {path.split("/")[1] for path in found["small"] if path.startswith("cache/")}
    assert kinds == {".lock", "modules"}


def test_temporary_files_go_where_the_bundle_goes(unshare: list[str], tmp_path: Path) -> None:
    """F06: a TMPDIR without room is of no concern."""
    found = run(unshare, tmp_path, "tmpdir")
    assert (found["error"], found["small"], found["sound"]) == (None, [], True)
