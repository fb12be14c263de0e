"""Publishers that are killed or that compete: the target is always one writer's whole bundle.

Every writer fills module and archives with its own tag, so that a mix would show.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bundles import publish_sample
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.artifacts.manifest import MANIFEST_NAME

TESTS = Path(__file__).parents[1]

# argv: target, rounds, how ("exchange", "renames" or "in_place"), first tag. Prints a line when
# ready, then publishes bundles tagged first, first + 1 ... and prints each tag that is done.
WRITER = """
import sys
from pathlib import Path
from bundles import publish_sample
from shark_llm.artifacts import publish as module
target, rounds, how, first = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if how == "renames":
    module._exchange = lambda one, other: False
if how == "in_place":
    module._is_confined = lambda path: path == target
print("ready", flush=True)
for tag in range(first, first + rounds):
    tp = 1 + tag % 3
    publish_sample(target, tp=tp, digest=f"{tag:064x}", module=str(tag).encode())
    print(tag, flush=True)
"""


def start(target: Path, *, rounds: int, how: str, first: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(target), str(rounds), how, str(first)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )


def tag_of(target: Path) -> int:
    """The writer whose bundle this is; every byte of every file must be of that one."""
    bundle = open_bundle(target, verify="digests", runtime_version="3.13.0")
    tag = int(bundle.module.read_bytes())
    assert bundle.manifest.source.digest == f"{tag:064x}"
    assert bundle.manifest.tp == 1 + tag % 3
    present = {path.name for path in target.iterdir() if not path.name.startswith(".shark")}
    assert present == {*bundle.manifest.files, MANIFEST_NAME}
    return tag


@pytest.mark.parametrize(("how", "rounds"), [("exchange", 16), ("renames", 8), ("in_place", 8)])
def test_killed_at_any_moment(how: str, rounds: int, tmp_path: Path) -> None:
    """F04: kill -9 leaves the old bundle, a newer one, or none; the next publisher cleans up."""
    target = tmp_path / "bundle"
    target.mkdir()
    chance = random.Random(7)
    done = 0
    for number in range(rounds):
        writer = start(target, rounds=1000, how=how, first=done + 1)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0, 0.12))
        writer.send_signal(signal.SIGKILL)
        finished = [int(line) for line in writer.stdout.read().split()]
        writer.stdout.close()
        writer.wait()
        done = max([done, *finished])
        if (target / MANIFEST_NAME).exists():
            tag = tag_of(target)
            assert tag in (done, done + 1), f"round {number}: not the last one finished or begun"
            done = tag
        elif how == "exchange":
            assert done == 0, "an exchange never leaves a gap"
    writer = start(target, rounds=1, how=how, first=5000)
    assert writer.communicate()[0] == "ready\n5000\n"
    assert tag_of(target) == 5000
    assert os.listdir(tmp_path) == ["bundle"], "nothing of the dead is left beside it"
    assert not [name for name in os.listdir(target) if name.startswith(".shark")]


@pytest.mark.parametrize("how", ["exchange", "renames"])
def test_writers_that_compete(how: str, tmp_path: Path) -> None:
    """F04: two writers, 20 rounds each; a reader sees only whole bundles."""
    target = publish_sample(tmp_path / "bundle", tp=1, digest=f"{0:064x}", module=b"0")
    writers = [start(target, rounds=20, how=how, first=first) for first in (1000, 2000)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if how == "exchange":
            bundle = open_bundle(target, runtime_version="3.13.0")
            seen.add(int(bundle.manifest.source.digest, 16))
        else:  # between two renames there is no bundle for a moment
            time.sleep(0.01)
    tags = [[int(line) for line in w.communicate()[0].split()[1:]] for w in writers]
    assert [len(done) for done in tags] == [20, 20], "each finished every round"
    assert tag_of(target) in (1019, 2019)
    assert seen <= {0, *tags[0], *tags[1]}
    assert os.listdir(tmp_path) == ["bundle"]
