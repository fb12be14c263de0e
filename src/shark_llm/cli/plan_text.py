"""What shark-compile plan prints: tables for people, a dictionary for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from shark_llm.artifacts.manifest import WeightsDtype, precision
from shark_llm.model.config import ModelConfig
from shark_llm.planner import GIB, RESERVE_BYTES, DeviceMemory, MemoryPlan, TpMemory
from shark_llm.sharding.plan import RankShape, plan_parameters, plan_ranks


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A model's memory plan with all that it was asked for."""

    name: str
    config: ModelConfig
    target: str
    device: DeviceMemory
    dtype: str
    """Of KV cache, and of weights unless `weights_dtype` says otherwise."""
    max_model_len: int
    step_tokens: int
    """Of the steps that the workspace is for."""
    memory: MemoryPlan
    ranks: tuple[RankShape, ...] | None
    """At the tp that is to be shown rank by rank."""
    weights_dtype: WeightsDtype | None = None
    notes: tuple[str, ...] = ()


def print_report(report: PlanReport, console: Console) -> None:
    """Tables with rich on a terminal, else plain columns."""
    for line in _head(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    _print_table(console, _TP_COLUMNS, [_tp_row(split, report) for split in report.memory.splits])
    for line in _tail(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report.ranks is not None:
        console.print()
        _print_table(console, RANK_COLUMNS, [rank_row(rank) for rank in report.ranks])


def report_to_dict(report: PlanReport) -> dict[str, Any]:
    """Everything as plain JSON values, sizes in bytes; `placement` only where a tp was named."""
    config, memory = report.config, report.memory
    fields: dict[str, Any] = {
        "model": report.name,
        "target": report.target,
        "device": report.device.name,
        "memory_bytes": memory.memory_bytes,
        "memory_is_shared": report.device.is_shared,
        "reserve_bytes": RESERVE_BYTES,
        "dtype": report.dtype,
        "weights_dtype": report.weights_dtype,
        "kv_dtype": report.dtype,
        "max_model_len": report.max_model_len,
        "max_num_seqs": memory.max_num_seqs,
        "max_num_batched_tokens": report.step_tokens,
        "lower_bound": memory.lower_bound,
        "splits": [_split_to_dict(split, config) for split in memory.splits],
        "notes": list(report.notes),
    }
    if report.ranks is not None:
        tp = len(report.ranks)
        quantized = report.weights_dtype is not None
        placement = plan_parameters(config, tp, quantized=quantized)
        fields["placement"] = {
            "tp": tp,
            "parameters": {name: place.model_dump() for name, place in placement.items()},
        }
    return fields


def _split_to_dict(split: TpMemory, config: ModelConfig) -> dict[str, Any]:
    shapes = plan_ranks(config, split.tp)
    return {
        "tp": split.tp,
        "fits": split.fits,
        "kv_tokens": split.kv_tokens,
        "kv_tokens_needed": split.kv_tokens_needed,
        "longest_len": split.longest_len,
        "workspace_is_estimate": split.workspace_is_estimate,
        "ranks": [
            asdict(rank)
            | {
                name: [held.start, held.stop]
                for name, held in (
                    ("heads", shape.heads),
                    ("kv_heads", shape.kv_heads),
                    ("intermediate", shape.intermediate),
                    ("vocab", shape.vocab),
                )
            }
            for rank, shape in zip(split.ranks, shapes, strict=True)
        ],
    }


_TP_COLUMNS = ("tp", "weights", "KV per token", "workspace (est.)", "KV tokens left", "fits")
RANK_COLUMNS = ("rank", "query heads", "kv heads", "MLP columns", "vocab rows")


def _head(report: PlanReport) -> Iterator[str]:
    for note in report.notes:
        yield f"note: {note}"
    config, device, memory = report.config, report.device, report.memory
    yield (
        f"{report.name}: {config.num_layers} layers, {config.num_heads} query and "
        f"{config.num_kv_heads} kv heads of {config.head_dim}, hidden {config.hidden_size}, "
        f"MLP {config.intermediate_size}, vocabulary {config.vocab_size}"
    )
    each = "shared by all ranks" if device.is_shared else "for each rank"
    yield (
        f"{report.target}, {device.name}: {memory.memory_bytes / GIB:.1f} GiB {each}, of which "
        f"{RESERVE_BYTES / GIB:.0f} GiB are kept free; weights and KV cache in "
        f"{precision(report.dtype, report.weights_dtype)}"
    )
    seqs = memory.max_num_seqs
    yield (
        f"it fits when {seqs} sequence{'s' if seqs > 1 else ''} of {report.max_model_len} tokens "
        f"{'have' if seqs > 1 else 'has'} room beside steps of {report.step_tokens} tokens; sizes "
        "are of the fullest rank"
    )
    yield ""


def _tp_row(split: TpMemory, report: PlanReport) -> tuple[str, ...]:
    fullest = max(split.ranks, key=lambda rank: rank.weight_bytes)
    return (
        str(split.tp),
        f"{fullest.weight_bytes / GIB:.2f} GiB",
        f"{max(rank.kv_bytes_per_token for rank in split.ranks) / 1024:g} KiB",
        f"{max(rank.workspace_bytes for rank in split.ranks) / GIB:.2f} GiB"
        + ("" if split.workspace_is_estimate else " (module)"),
        str(split.kv_tokens),
        "yes" if split.fits else "no",
    )


def _tail(report: PlanReport) -> Iterator[str]:
    memory = report.memory
    yield ""
    if memory.lower_bound is not None:
        yield f"the least tp that fits is {memory.lower_bound}"
        return
    best = max(memory.splits, key=lambda split: split.longest_len)
    yield (
        f"no tp fits; tp {best.tp} would with --max-model-len {best.longest_len}"
        if best.longest_len
        else "no tp fits, whatever the length: use devices with more memory"
    )


def rank_row(rank: RankShape) -> tuple[str, ...]:
    """What a rank holds: how many of each, and which."""
    held = (rank.heads, rank.kv_heads, rank.intermediate, rank.vocab)
    return (str(rank.rank), *(f"{len(part)} ({part.start}-{part.stop - 1})" for part in held))


def _print_table(console: Console, columns: Sequence[str], rows: list[tuple[str, ...]]) -> None:
    if console.is_terminal:
        table = Table()
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (tuple(columns), *rows):
        line = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line, markup=False, highlight=False, soft_wrap=True)
