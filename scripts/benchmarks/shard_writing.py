"""shard write: how fast archives are written, beside `cp` of the same bytes.

A checkpoint of the shape of SmolLM2 360M with random weights lies in the page cache. In each round
its archives are written and then copied by cp, or in the other order; what earlier rounds left to
write to the disk is written before the clock starts. Neither side waits for the disk, which would
be all that is measured: with files of 2.5 GB, whichever side came second was up to 5 times slower.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file

from benchmarks import machine, peers
from benchmarks.results import Fact, Machine
from benchmarks.shard_builds import published_config
from shark_llm.artifacts.irpa import Identity
from shark_llm.checkpoint.names import to_hf_name
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.checkpoint.source import Checkpoint
from shark_llm.model.config import config_from_hf
from shark_llm.sharding.apply import write_archives
from shark_llm.sharding.plan import parameter_shapes, plan_parameters

KEPT = peers.ROOT / "docs" / "sharding" / "writing.json"
RECIPE = "smollm2-360m"
CASES = (("bf16", 1), ("bf16", 2), ("bf16", 8), ("f16", 8))
"""dtype of the archives, and tp; the checkpoint is bf16, so that f16 is cast."""


class Writing(Fact):
    """One case. Seconds are of each round, in order."""

    dtype: str
    tp: int
    num_bytes: int
    """Of all archives: what both sides write."""
    ours: list[float]
    cp: list[float]
    started: str
    commit: str
    machine: Machine

    @property
    def ratios(self) -> list[float]:
        """Our throughput over that of cp, round by round."""
        return [cp / ours for cp, ours in zip(self.cp, self.ours, strict=True)]


_WRITINGS = TypeAdapter(list[Writing])


def measure(rounds: int, path: Path = KEPT) -> None:
    """Measure all cases, and write them to `path`."""
    room = peers.CACHE / "writing"
    checkpoint = open_checkpoint(_checkpoint(room / "model"))
    found = [_case(checkpoint, room, dtype, tp, rounds) for dtype, tp in CASES]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_WRITINGS.dump_json(found, indent=1) + b"\n")


def read(path: Path = KEPT) -> list[Writing]:
    """What `measure` wrote, nothing where there is no file."""
    return _WRITINGS.validate_json(path.read_bytes()) if path.exists() else []


def _checkpoint(directory: Path) -> Path:
    """Random weights in bf16, made once; 0.7 GB."""
    if (directory / "config.json").exists():
        return directory
    hf = published_config(RECIPE)
    generator = torch.Generator().manual_seed(0)
    weights = {
        to_hf_name(name): torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in parameter_shapes(config_from_hf(hf)).items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(hf))
    return directory


def _case(checkpoint: Checkpoint, room: Path, dtype: str, tp: int, rounds: int) -> Writing:
    facts, started = machine.facts(), machine.now()
    written, copied = room / "written", room / "copied"
    identity = Identity(model="0" * 64, tp=tp, rank=None, dtype=dtype)
    plan = plan_parameters(checkpoint.config, tp)

    def ours() -> None:
        write_archives(checkpoint, plan, identity=identity, out_dir=written)

    def cp() -> None:
        subprocess.run(["cp", *map(str, sorted(source.iterdir())), str(copied)], check=True)

    source = room / "source"
    times: dict[Callable[[], None], list[float]] = {ours: [], cp: []}
    _empty([written, source])
    ours()
    written.rename(source)  # what cp copies, and in the page cache as the checkpoint is
    num_bytes = sum(path.stat().st_size for path in source.iterdir())
    for number in range(rounds):
        for side in (ours, cp) if number % 2 else (cp, ours):
            _empty([written, copied])
            os.sync()
            before = time.perf_counter()
            side()
            times[side].append(round(time.perf_counter() - before, 3))
    found = Writing(
        dtype=dtype,
        tp=tp,
        num_bytes=num_bytes,
        ours=times[ours],
        cp=times[cp],
        started=started,
        commit=machine.commit(),
        machine=facts,
    )
    shown = " ".join(f"{ratio:.2f}" for ratio in found.ratios)
    print(f"bench: {dtype} tp {tp}: {shown} of cp's throughput", flush=True)
    for path in (written, copied, source):
        shutil.rmtree(path, ignore_errors=True)
    return found


def _empty(directories: Iterable[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()


def table(writings: Sequence[Writing]) -> str:
    """Markdown: medians, with the range of the ratio."""
    if not writings:
        return ""
    lines = ["| archives | tp | bytes | shark-llm | cp | ratio (range) |", f"|{'---|' * 6}"]
    for w in writings:
        rates = [w.num_bytes / statistics.median(times) / 1e9 for times in (w.ours, w.cp)]
        cells = [w.dtype, str(w.tp), f"{w.num_bytes / 1e9:.2f} GB"]
        cells += [f"{rate:.2f} GB/s" for rate in rates]
        cells += [f"{statistics.median(w.ratios):.2f} ({min(w.ratios):.2f}-{max(w.ratios):.2f})"]
        lines.append(f"| {' | '.join(cells)} |")
    first = writings[0]
    lines += ["", f"{first.machine.cpu}, {first.machine.cores} cores, commit {first.commit}."]
    return "\n".join(lines) + "\n"
