"""shard compile, shard depth: what it takes to compile published shapes with dummy weights.

Each build is a process of its own, of shark-compile as a user runs it; its report has times and
memory. What was measured is written after every build, so that a run can be broken off and go on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from benchmarks import machine, peers
from benchmarks.peers import PeerError
from benchmarks.results import Fact, Machine
from benchmarks.timing import machine_busy_seconds
from shark_llm.errors import UsageError
from shark_llm.recipes import load_recipe
from shark_llm.runtime.cores import usable_cores

KEPT = peers.ROOT / "docs" / "sharding" / "builds.json"
CONFIGS = peers.ROOT / "tests" / "published_configs"
TARGET = "gfx942"


class Shape(Fact):
    """What is compiled: a recipe's model at a tp, at its own depth (None) or another."""

    recipe: str
    tp: int
    layers: int | None = None

    def __str__(self) -> str:
        depth = "" if self.layers is None else f":{self.layers}"
        return f"{self.recipe}:{self.tp}{depth}"


class FullSizeBuild(Fact):
    """One build. Memory is the highest that was resident at once; sizes are in bytes."""

    shape: Shape
    target: str
    entry_points: list[str]
    export_seconds: float
    compile_seconds: float
    wall_seconds: float
    """From the start of shark-compile to its end."""
    cpu_seconds: float
    """Of shark-compile and the compiler, on all cores together."""
    process_peak_bytes: int
    """Of shark-compile's own process, in its largest stage."""
    compiler_peak_bytes: int
    module_bytes: int
    started: str
    commit: str
    cores: int
    """That the build could use."""
    others: float
    """The share of the machine's CPU time that other processes took meanwhile, 0 to 1."""
    machine: Machine
    versions: dict[str, str]


FULL_SIZE = (
    *(Shape(recipe="llama-3.1-8b", tp=tp) for tp in (8, 1, 2, 4)),
    *(Shape(recipe="mistral-nemo-base-2407", tp=tp) for tp in (1, 2)),
    *(Shape(recipe="llama-3.1-70b", tp=tp) for tp in (8, 4)),
    *(Shape(recipe="llama-3.1-405b", tp=tp) for tp in (8, 5)),
)
DEPTHS = tuple(
    Shape(recipe="llama-3.2-1b", tp=tp, layers=layers) for tp in (2, 8) for layers in (8, 16, 32)
)


def parse_shape(text: str) -> Shape:
    """RECIPE:TP or RECIPE:TP:LAYERS. Raises ValueError for anything else."""
    recipe, tp, *layers = text.split(":")
    (depth,) = map(int, layers) if layers else (None,)
    return Shape(recipe=recipe, tp=int(tp), layers=depth)


def measure(shapes: Iterable[Shape], path: Path = KEPT) -> None:
    """Build what `path` does not have yet, and add it there. Raises PeerError for a failed one."""
    for shape in shapes:
        known = read(path)
        if any(build.shape == shape for build in known):
            print(f"bench: {shape}: measured before", flush=True)
            continue
        print(f"bench: {shape}: shark-compile for {TARGET}", flush=True)
        build = _build(shape)
        print(
            f"bench: {shape}: export {build.export_seconds:.0f} s, compile "
            f"{build.compile_seconds:.0f} s, {build.compiler_peak_bytes / 1e9:.2f} GB",
            flush=True,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_BUILDS.dump_json([*known, build], indent=1) + b"\n")


_BUILDS = TypeAdapter(list[FullSizeBuild])


def read(path: Path = KEPT) -> list[FullSizeBuild]:
    """The builds of a file, none where there is no file. Raises UsageError for another file."""
    if not path.exists():
        return []
    try:
        return _BUILDS.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg']}: remove it, or correct it") from error


def _build(shape: Shape) -> FullSizeBuild:
    room = peers.CACHE / "shard"
    shutil.rmtree(room, ignore_errors=True)
    (room / "model").mkdir(parents=True)
    (room / "model" / "config.json").write_text(json.dumps(_config(shape)))
    facts, started, before = machine.facts(), machine.now(), machine_busy_seconds()
    clock = time.perf_counter()
    with (room / "log").open("w") as log:
        process = subprocess.Popen(_command(shape, room), stdout=log, stderr=log)
        # wait4 tells what this child and its own children used.
        _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - clock
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        shown = (room / "log").relative_to(peers.ROOT)
        raise PeerError(f"{shape}: shark-compile ended with {process.returncode}: see {shown}")
    report = json.loads((room / "dev" / "build-report.json").read_text())
    stages = {stage["name"]: stage for stage in report["stages"]}
    manifest = json.loads((room / "bundle" / "manifest.json").read_text())
    own = used.ru_utime + used.ru_stime
    others = (machine_busy_seconds() - before - own) / (wall * (os.cpu_count() or 1))
    build = FullSizeBuild(
        shape=shape,
        target=TARGET,
        entry_points=[entry["name"] for entry in manifest["entry_points"]],
        export_seconds=round(stages["export"]["seconds"], 1),
        compile_seconds=round(stages["compile"]["seconds"], 1),
        wall_seconds=round(wall, 1),
        cpu_seconds=round(own, 1),
        process_peak_bytes=max(
            s["peak_memory_bytes"] for s in stages.values() if not s["compiler_peak_bytes"]
        ),
        compiler_peak_bytes=stages["compile"]["compiler_peak_bytes"],
        module_bytes=manifest["files"]["model.vmfb"]["size"],
        started=started,
        commit=machine.commit(),
        cores=len(usable_cores()),
        others=round(min(1.0, max(0.0, others)), 2),
        machine=facts,
        versions=machine.versions(),
    )
    shutil.rmtree(room)
    return build


def _command(shape: Shape, room: Path) -> list[str]:
    command = [str(Path(sys.executable).with_name("shark-compile")), "--recipe", shape.recipe]
    command += ["--hf-model", str(room / "model"), "--weights", "dummy", "--force"]
    command += ["--compile-target", TARGET, "--tp", str(shape.tp)]
    command += ["--output-artifacts-dir", str(room / "bundle")]
    return [*command, "--output-dev-artifacts-dir", str(room / "dev")]


def published_config(recipe: str) -> dict[str, Any]:
    """The config.json of a recipe's model."""
    name = load_recipe(recipe).model.replace("/", "--")
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config


def _config(shape: Shape) -> dict[str, Any]:
    depth = {} if shape.layers is None else {"num_hidden_layers": shape.layers}
    return published_config(shape.recipe) | depth


def tables(builds: Sequence[FullSizeBuild]) -> str:
    """Both tables as Markdown: the published shapes, then the depths."""
    whole = [build for build in builds if build.shape.layers is None]
    depths = [build for build in builds if build.shape.layers is not None]
    parts = []
    for rows, depth in ((whole, False), (depths, True)):
        if rows:
            parts += [*_table(rows, depth=depth), ""]
    if builds:
        first = builds[0]
        facts = first.machine
        commits = sorted({build.commit for build in builds})
        parts += [
            f"{TARGET}, {facts.cpu} with {facts.cores} cores and {facts.memory_gib:g} GiB, IREE "
            f"compiler {first.versions['iree-base-compiler']}, commit {', '.join(commits)}. "
            "*busy* is what else ran on the machine meanwhile, as a share of its cores.",
            "",
        ]
    return "\n".join(parts)


def _table(builds: Sequence[FullSizeBuild], *, depth: bool) -> list[str]:
    columns = ["recipe", *(["layers"] if depth else []), "tp", "entry points", "export", "compile"]
    columns += ["CPU time", "memory, compiler", "memory, shark-compile", "module", "busy"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for b in builds:
        cells = [f"`{b.shape.recipe}`", *([str(b.shape.layers)] if depth else []), str(b.shape.tp)]
        cells += [str(len(b.entry_points)), f"{b.export_seconds:.0f} s"]
        cells += [f"{b.compile_seconds:.0f} s", f"{b.cpu_seconds:.0f} s"]
        cells += [f"{b.compiler_peak_bytes / 1e9:.2f} GB"]
        cells += [f"{b.process_peak_bytes / 1e9:.2f} GB", f"{b.module_bytes / 1e6:.1f} MB"]
        lines.append(f"| {' | '.join([*cells, f'{b.others:.0%}'])} |")
    return lines
