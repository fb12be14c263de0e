"""What the repository may hold: no machine's paths, no registry's hosts, nothing generated."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Joined from parts, so that this file does not hold what it looks for.
HOSTS = ["py" + "pi.org", "files.python" + "hosted.org", "registry.np" + "mjs.org"]
HOSTS += ["deb.deb" + "ian.org", "proxy.go" + "lang.org"]
# A home or work directory of some machine, but not the tail of a longer path or URL.
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:work|root|opt|(?:home|Users)/\w+)/")


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_bytes().decode(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line) or any(host in line for host in HOSTS):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found


@pytest.mark.parametrize(
    ("line", "folder", "is_machine_path"),
    [
        ("cd /{}/main", "work", True),
        ('"/{}/.cache"', "root", True),
        ("/{}/bundle", "home/someone", True),
        ("https://example.com/{}/x", "work", False),
        ("~/artifacts, tests/{}/x", "root", False),
        ("$HOME/{}/x", "opt", False),
    ],
)
def test_machine_path_pattern(line: str, folder: str, is_machine_path: bool) -> None:
    assert bool(MACHINE_PATH.search(line.format(folder))) == is_machine_path


def test_nothing_generated_is_tracked() -> None:
    """What .gitignore names is not in the repository, and no file is large."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert listing.stdout == ""
    suffixes = {".vmfb", ".irpa", ".gguf", ".safetensors", ".whl", ".npy"}
    assert [path for path in tracked_files() if path.suffix in suffixes] == []
    assert [path for path in tracked_files() if path.stat().st_size > 1_000_000] == []


def test_no_module_is_named_for_nothing() -> None:
    """Rule of the house: a helper lives with its owner."""
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    found = [path for path in tracked_files() if {path.stem, path.parent.name} & vague]
    assert found == []
