"""Public functions as data: what those of the module take and return.

Legend: N batch rows, S tokens of a row, T pages of a row's table, P pages of the pool,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shark_llm.artifacts.manifest import (
    SUM_BLOCK,
    CacheSpec,
    EntryPoint,
    Function,
    TensorSpec,
)
from shark_llm.errors import UsageError
from shark_llm.model.config import ModelConfig
from shark_llm.model.kv_cache import page_elements
from shark_llm.sharding.plan import RankShape

MAX_BATCH_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What is compiled, whatever the target."""

    page_size: int = 16
    batch_sizes_prefill: tuple[int, ...] = (1, 4)
    batch_sizes_decode: tuple[int, ...] = (1, 4, 8)
    dtype: str = "bf16"
    """Of weights and matrix operands: bf16, f16 or f32."""

    def __post_init__(self) -> None:
        if self.page_size < 2 or self.page_size > 256 or self.page_size & (self.page_size - 1):
            raise UsageError(f"page size {self.page_size}: take a power of two from 2 to 256")
        for phase in ("prefill", "decode"):
            sizes: tuple[int, ...] = getattr(self, f"batch_sizes_{phase}")
            if not sizes:
                raise UsageError(f"--batch-sizes-{phase} is empty: name at least one batch size")
            if list(sizes) != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] > MAX_BATCH_SIZE:
                raise UsageError(
                    f"--batch-sizes-{phase} {' '.join(map(str, sizes))}: take different sizes from "
                    f"1 to {MAX_BATCH_SIZE}, ascending"
                )


def entry_points(settings: ExportSettings, vocab_size: int) -> tuple[EntryPoint, ...]:
    """The public functions, in the order prefill, decode; smallest batch first."""
    return tuple(_entry_points(settings, vocab_size))


def _entry_points(settings: ExportSettings, vocab_size: int) -> Iterator[EntryPoint]:
    for phase, sizes in (
        ("prefill", settings.batch_sizes_prefill),
        ("decode", settings.batch_sizes_decode),
    ):
        for n in sizes:
            tokens = "seq" if phase == "prefill" else 1
            yield EntryPoint.model_validate(
                {
                    "name": f"{phase}_bs{n}",
                    "phase": phase,
                    "batch_size": n,
                    "inputs": (
                        TensorSpec(name="tokens", dtype="i64", shape=(n, tokens)),
                        TensorSpec(name="start_positions", dtype="i64", shape=(n,)),
                        TensorSpec(name="seq_lens", dtype="i64", shape=(n,)),
                        TensorSpec(name="page_table", dtype="i64", shape=(n, "table_pages")),
                    ),
                    "results": (
                        TensorSpec(name="logits", dtype="f32", shape=(n, vocab_size)),
                        TensorSpec(name="best_tokens", dtype="i64", shape=(n,)),
                    ),
                }
            )


def softmax_sums(settings: ExportSettings, vocab_size: int) -> tuple[Function, ...]:
    """One function for every batch size that an entry point has."""
    sizes = {*settings.batch_sizes_prefill, *settings.batch_sizes_decode}
    return tuple(
        Function(
            name=f"softmax_sums_bs{n}",
            batch_size=n,
            inputs=(
                TensorSpec(name="logits", dtype="f32", shape=(n, vocab_size)),
                TensorSpec(name="best_tokens", dtype="i64", shape=(n,)),
                TensorSpec(name="inverse_temperatures", dtype="f32", shape=(n,)),
            ),
            results=(TensorSpec(name="sums", dtype="f32", shape=(n, -(-vocab_size // SUM_BLOCK))),),
        )
        for n in sorted(sizes)
    )


def cache_specs(
    config: ModelConfig, settings: ExportSettings, ranks: Sequence[RankShape]
) -> tuple[CacheSpec, ...]:
    """Keys and values of every layer, rank by rank: each (P, one page of one layer)."""
    return tuple(
        CacheSpec(
            name=f"rank{rank.rank}.blk.{layer}.{kind}_cache",
            dtype=settings.dtype,
            shape=(
                "pool_pages",
                page_elements(rank.num_kv_heads, settings.page_size, config.head_dim),
            ),
            rank=rank.rank,
        )
        for rank in ranks
        for layer in range(config.num_layers)
        for kind in ("k", "v")
    )
