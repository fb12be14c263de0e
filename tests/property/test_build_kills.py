"""Builds that are killed at any moment: what the next one publishes is just what it was asked for.

The builds run in a process that is forked for each round from one that has imported everything, so
that a round takes a moment; exporter and compiler are fakes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROUNDS = 30

# argv: a directory, the number of rounds. Two models of one shape are built by turns into one
# bundle, with one cache; after each kill the bundle must be whole, every cache entry that is taken
# must be right, and a build of either model must give what it gives in an empty place.
PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path

import pytest

import tiny
from build_harness import FakeCompileSide, ListReporter, settings
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.artifacts.stage_cache import KINDS, StageCache
from shark_llm.build import build

root, rounds = Path(sys.argv[1]), int(sys.argv[2])
FakeCompileSide.install(pytest.MonkeyPatch())
models = [tiny.write_tiny(root / f"seed{seed}", seed=seed) for seed in range(2)]
bundle, cache = root / "bundle", root / "cache"

def made(number, out_dir, **fields):
    fields = {"target": ("x86-64-v3", "gfx942")[number // 2 % 2]} | fields
    wanted = settings(models[number % 2], out_dir, **fields)
    return build(wanted, ListReporter()).manifest

fresh = [made(number, root / f"fresh{number}") for number in range(4)]
chance = random.Random(11)
policies = ("on", "redo")
seen = 0
for round in range(rounds):
    child = os.fork()
    if child == 0:
        number = chance.randrange(4)
        while True:
            made(number, bundle, cache_dir=cache, cache_policy=policies[number % 3 == 0])
            number += 1
    time.sleep(chance.uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    chance.random()
    if (bundle / "manifest.json").exists():
        seen += 1
        found = open_bundle(bundle, verify="digests").manifest
        assert found in fresh, f"round {round}: a mixture"
    notes = []
    looking = StageCache(cache, "readonly", notes.append)
    for kind in KINDS:
        for cached in looking.entries(kind):
            assert looking.find(kind, cached.path.name) is not None, notes
    number = round % 4
    assert made(number, bundle, cache_dir=cache) == fresh[number], f"round {round}"
    assert open_bundle(bundle, verify="digests").manifest == fresh[number]
made(0, bundle, cache_dir=cache, cache_policy="redo")  # a writer, who cleans up
left = [path.name for path in root.rglob(".*") if path.name != ".lock"]
assert left == [], left
print("rounds with a bundle:", seen)
"""


def test_killed_at_thirty_moments(tmp_path: Path) -> None:
    """F04: `kill -9` never leaves what a later run accepts wrongly."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    # One thread: a pool that the parent has would be missing in its forks.
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(ROUNDS)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > ROUNDS // 2
