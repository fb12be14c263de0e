"""What shark-compile prints of a build beside its stages: the plan before, the sums after."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shark_llm.artifacts.manifest import precision
from shark_llm.stages import StageRecord

if TYPE_CHECKING:
    from shark_llm.build import BuildResult, DryRun


def plan_lines(dry_run: DryRun) -> list[str]:
    """What --dry-run prints: what would be fetched, reused and written, and whether it fits."""
    plan, reuse = dry_run.plan, dry_run.reuse
    config, settings = plan.config, plan.settings
    revision = "" if plan.revision is None else f" at {plan.revision}"
    lines = [
        f"model    {plan.name}{revision}: {config.architecture}, {config.num_layers} layers, "
        f"{config.num_heads} query and {config.num_kv_heads} kv heads of {config.head_dim}",
        f"target   {plan.target.name} ({plan.target.description}), tp {settings.tp}, "
        f"{precision(plan.export.dtype, settings.weights_dtype)}, pages of "
        f"{plan.export.page_size}, up to {plan.max_model_len} tokens",
        f"entries  prefill_bs{{{_listed(plan.export.batch_sizes_prefill)}}} "
        f"decode_bs{{{_listed(plan.export.batch_sizes_decode)}}}",
        f"flags    {shlex.join(plan.flags)}",
        f"fetch    {_fetched(dry_run)}",
    ]
    what = "write" if reuse.archives is None else "reuse"
    lines += [f"{what:<8} {name}: {size} bytes" for name, size in plan.file_bytes.items()]
    if reuse.module is not None:
        lines += [
            f"reuse    {name}: {info.size} bytes" for name, info in reuse.module.files.items()
        ]
    else:
        lines.append("write    model.vmfb: size known after compiling, some megabytes")
    if settings.dev_dir is not None:
        lines.append(f"{'reuse' if dry_run.dev_is_there else 'write':<8} {plan.dev_dir}")
    if reuse.everything and dry_run.dev_is_there:
        return [*lines, f"nothing to do: {plan.out_dir} is what was asked for already"]
    fits = "fits" if dry_run.needed_bytes <= dry_run.free_bytes else "does NOT fit"
    why = dry_run.why_no_golden
    return [
        *lines,
        f"check    {'golden check against the model' if why is None else f'none: {why}'}",
        f"disk     {_megabytes(dry_run.needed_bytes)} needed for {plan.out_dir}, "
        f"{_megabytes(dry_run.free_bytes)} free: {fits}",
    ]


def _fetched(dry_run: DryRun) -> str:
    if dry_run.plan.settings.weights == "dummy":
        return "nothing: the weights are dummies"
    if dry_run.plan.fetch_bytes:
        return _megabytes(dry_run.plan.fetch_bytes)
    return "nothing: all weights are here"


def result_lines(result: BuildResult) -> list[str]:
    """Time and memory of each stage, where the bundle lies and how it is served."""
    size = sum(info.size for info in result.manifest.files.values())
    seconds = sum(record.seconds for record in result.stages)
    took = f"reused, {seconds:.1f} s" if result.reused else f"{seconds:.1f} s"
    return [
        *([] if result.reused else stage_table(result.stages)),
        f"bundle   {result.path} ({_megabytes(size)}, {took})",
        f"serve    shark-serve --artifacts-dir {shlex.quote(str(result.path))}"
        + (" --allow-dummy-weights" if result.manifest.weights == "dummy" else ""),
    ]


def stage_table(records: Sequence[StageRecord]) -> list[str]:
    """A line per stage, in columns."""
    lines = ["stage          time    peak memory"]
    lines += [
        f"{record.name:<8} {record.seconds:>8.1f} s {record.peak_memory_bytes / 1e6:>11.0f} MB"
        for record in records
    ]
    return lines


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 10_000_000 else f"{count / 1e6:.0f} MB"
