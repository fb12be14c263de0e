"""A bundle on a file system that is mounted read-only, where root cannot write either."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import sys
from pathlib import Path

from shark_llm.artifacts.bundle import open_bundle
from shark_llm.runtime.devices import DeviceConfig
from shark_llm.runtime.module import load_runner
from shark_llm.runtime.runner import Row

place = Path(sys.argv[1])
try:
    (place / "written").touch()
except OSError as error:
    print(error.strerror)
runner = load_runner(open_bundle(place, verify="digests"), DeviceConfig(driver="local-sync"), 64)
print(runner.run("decode", [Row(tokens=[5], start=0, pages=[1])]).best_tokens[0])
runner.close()
"""


def test_a_bundle_that_cannot_be_written_to_runs(
    compiled: Callable[[str], Any], tmp_path: Path
) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("mount namespaces are not allowed here")
    place = tmp_path / "mounted"
    place.mkdir()
    script = f'mount --bind "$0" {place} && mount -o remount,ro,bind {place} && exec "$@"'
    command = [*unshare, "sh", "-c", script, str(compiled("t0").bundle.path)]
    result = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM, str(place)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    refused, token = result.stdout.splitlines()
    assert refused == "Read-only file system"
    assert 0 <= int(token) < 512
