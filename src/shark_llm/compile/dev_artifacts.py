"""What a compiler engineer starts from: the module's source, the command, flagfiles and inputs.

    model.mlir                     what iree-compile was given
    compile-command.sh             compiles it again, to the same digest
    benchmark-flags.txt            iree-benchmark-module --flagfile=..., the default entry point
    benchmark-flags/<entry>.txt    the same for each entry point
    inputs/<entry>/*.npy           tokens, start positions, lengths and page tables
    build-report.json              settings, versions, time and peak memory of each stage
    phases/                        with --save-intermediates: the module after each compiler phase,
    executable-sources/            every dispatch before code generation,
    executable-benchmarks/         and every dispatch as a module that can be benchmarked alone

Flagfiles name files by absolute path, so that they run from any working directory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shark_llm.artifacts.manifest import EntryPoint, Manifest

MLIR_NAME = "model.mlir"
SCRIPT_NAME = "compile-command.sh"
BENCHMARK_PROMPT_TOKENS = 128
BENCHMARK_CONTEXT_TOKENS = 192


def write_dev_artifacts(
    staging: Path, *, dev_dir: Path, bundle_dir: Path, manifest: Manifest
) -> None:
    """Write flagfiles and inputs into `staging`, whose final place is `dev_dir`.

    `bundle_dir` is where the bundle is published.
    """
    (staging / "benchmark-flags").mkdir()
    default = default_entry_point(manifest.entry_points)
    for entry in manifest.entry_points:
        inputs = benchmark_inputs(entry, manifest.page_size, manifest.max_model_len)
        directory = Path("inputs") / entry.name
        (staging / directory).mkdir(parents=True)
        for spec, array in zip(entry.inputs, inputs, strict=True):
            np.save(staging / directory / f"{spec.name}.npy", array)
        lines = flag_lines(manifest, entry, bundle_dir, dev_dir / directory, int(inputs[3].max()))
        text = "\n".join(lines) + "\n"
        (staging / "benchmark-flags" / f"{entry.name}.txt").write_text(text)
        if entry == default:
            (staging / "benchmark-flags.txt").write_text(text)


def default_entry_point(entries: Sequence[EntryPoint]) -> EntryPoint:
    """The smallest decode: what is run once per generated token."""
    return min((e for e in entries if e.phase == "decode"), key=lambda e: e.batch_size)


def flag_lines(
    manifest: Manifest, entry: EntryPoint, bundle_dir: Path, inputs_dir: Path, last_page: int
) -> list[str]:
    """The flagfile of one entry point, a flag a line."""
    target = manifest.target
    built = f"{manifest.source.name}, {manifest.precision}, tp {manifest.tp}, {target.name}"
    lines = [
        f"# {built}: {entry.name}",
        f"--module={bundle_dir / manifest.module}",
        f"--function={entry.name}",
    ]
    lines += [
        f"--device={target.driver}"
        if target.driver == "local-task"
        else f"--device={target.driver}://{rank}"
        for rank in range(manifest.tp)
    ]
    lines += [
        f"--parameters={manifest.parameter_scope}={bundle_dir / name}" for name in manifest.archives
    ]
    lines += [f"--input=@{inputs_dir / spec.name}.npy" for spec in entry.inputs]
    for cache in manifest.caches:
        dims = [str(last_page + 1) if isinstance(dim, str) else str(dim) for dim in cache.shape]
        lines.append(f"--input={'x'.join([*dims, cache.dtype])}=0")
    return lines


def benchmark_inputs(
    entry: EntryPoint, page_size: int, max_model_len: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """tokens (N, S), start_positions (N), seq_lens (N), page_table (N, T): a typical step.

    Prefill of a prompt of 128 tokens, or one decode step at a context of 192, or what the model
    allows; every row has pages of its own.
    """
    n = entry.batch_size
    if entry.phase == "prefill":
        seq_len = min(BENCHMARK_PROMPT_TOKENS, max_model_len)
        width, start = math.ceil(seq_len / page_size) * page_size, 0
    else:
        seq_len = min(BENCHMARK_CONTEXT_TOKENS, max_model_len)
        width, start = 1, seq_len - 1
    table_pages = math.ceil(seq_len / page_size)
    return (
        np.full((n, width), 1, np.int64),
        np.full(n, start, np.int64),
        np.full(n, seq_len, np.int64),
        np.arange(1, n * table_pages + 1, dtype=np.int64).reshape(n, table_pages),
    )
