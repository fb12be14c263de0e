"""The benchmarks of scripts/ for the tests, and small results to try them on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import (  # noqa: E402
    builds,
    load,
    openvino_peer,
    page,
    peers,
    plots,
    results,
    revisions,
    servers,
    serving,
    shard,
    shard_builds,
    shard_writing,
    sharing,
    sides,
    steps,
    tables,
    timing,
    worker,
)
from benchmarks.results import (  # noqa: E402
    OPENVINO,
    OURS,
    PEER,
    LoadRound,
    LoadSeries,
    Machine,
    Result,
    Round,
    Series,
    ServeCase,
    StepCase,
)

__all__ = [
    "OPENVINO",
    "OURS",
    "PEER",
    "LoadRound",
    "Series",
    "builds",
    "command",
    "load",
    "openvino_peer",
    "page",
    "peers",
    "plots",
    "results",
    "revisions",
    "servers",
    "serving",
    "shard",
    "shard_builds",
    "shard_writing",
    "sharing",
    "sides",
    "steps",
    "tables",
    "timing",
    "worker",
]


def a_round(*milliseconds: float, cpu: float = 1.0, others: float = 0.01) -> Round:
    """Steps of so many milliseconds, taking `cpu` times as much CPU time."""
    walls = [round(value * 1000) for value in milliseconds]
    return Round(wall_us=walls, cpu_us=round(sum(walls) * cpu), others=others, load=0.5)


def a_case(
    ours: Sequence[Round],
    peer: Sequence[Round] | None = None,
    *,
    phase: str = "decode",
    batch: int = 4,
    context: int = 128,
) -> StepCase:
    """A case on one core that must read 1 GB."""
    series = [Series(side=OURS, rounds=list(ours))]
    if peer is not None:
        series.append(Series(side=PEER, rounds=list(peer)))
    fields = {"cores": 1, "phase": phase, "batch": batch, "context": context}
    return StepCase.model_validate({**fields, "bytes_read": 10**9, "series": series})


def a_load(
    *,
    tokens: int,
    seconds: float,
    gap_ms: float = 10.0,
    others: float = 0.01,
    device_wait: float | None = None,
) -> LoadRound:
    return LoadRound(
        output_tokens=tokens,
        wall_s=seconds,
        ttft_ms=[40.0, 60.0],
        tpot_ms=[11.0, 13.0],
        gap_p50_ms=gap_ms,
        gap_p95_ms=2 * gap_ms,
        server_cpu_s=seconds,
        others=others,
        load=0.5,
        device_wait=device_wait,
    )


def a_serve_case(
    ours: list[LoadRound],
    module: list[StepCase],
    peer: list[LoadRound] | None = None,
    *,
    concurrency: int = 8,
) -> ServeCase:
    """Streams of 128+64 tokens on one core."""
    series = [LoadSeries(side=OURS, rounds=ours)]
    if peer is not None:
        series.append(LoadSeries(side=PEER, rounds=peer))
    return ServeCase(
        cores=1,
        concurrency=concurrency,
        prompt_tokens=128,
        max_tokens=64,
        series=series,
        module=module,
    )


def a_result(**fields: object) -> Result:
    machine = Machine(
        cpu="Some CPU",
        family="family 1, model 2",
        cores=2,
        threads=4,
        virtual=True,
        caches={"L1d": "32K", "L3": "8192K"},
        features=["avx", "avx2"],
        memory_gib=8.0,
        kernel="Linux 6.0",
        load=[0.25, 0.5, 0.5],
    )
    ordinary = {
        "benchmark": "decode",
        "command": "scripts/bench decode",
        "started": "2026-01-02 03:04 UTC",
        "commit": "0123456789ab",
        "model": "SmolLM2",
        "dtype": "bf16",
        "machine": machine,
        "versions": {"shark-llm": "0.1.0"},
    }
    return Result.model_validate(ordinary | fields)
