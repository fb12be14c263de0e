"""The scripts' own environment: made once, found again, also by a script that another one calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

FIND_PYTHON = """
set -euo pipefail
source <(sed -n '/^find_python()/,/^}/p' scripts/env)
find_python
"""


def find_python(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", FIND_PYTHON],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )


def test_the_interpreter_is_found_inside_an_environment(tmp_path: Path) -> None:
    """A script called by another one took .venv's own python for the base, and made .venv anew."""
    outside = find_python().stdout.strip()
    subprocess.run([outside, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    inside = find_python(PATH=f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}").stdout.strip()
    assert inside == outside
    assert Path(inside).is_file()
    assert not (Path(inside).parent.parent / "pyvenv.cfg").exists()


def test_no_fit_interpreter_is_no_interpreter() -> None:
    assert find_python(PYTHON="no-such-python false").returncode != 0
