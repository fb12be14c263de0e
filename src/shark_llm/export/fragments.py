"""Which fragments an entry point needs, with their argument types.

Legend: N batch rows, S tokens of a row, T pages of a row's table, P pages of the pool, H hidden
size, M = N * S, L page size, F = head_dim / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shark_llm.artifacts.manifest import SUM_BLOCK, EntryPoint, Function
from shark_llm.export.page_attention import walks_pages
from shark_llm.export.trace import DynamicDim, Fragment, FragmentLibrary, TensorType
from shark_llm.model import llama
from shark_llm.model.config import ModelConfig
from shark_llm.model.kv_cache import head_rows, page_elements
from shark_llm.model.llama import AttentionForm
from shark_llm.sharding.plan import RankShape

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
}
TABLE_PAGES = DynamicDim(name="table_pages")
POOL_PAGES = DynamicDim(name="pool_pages")


@dataclass(frozen=True, kw_only=True)
class RankFragments:
    """The fragments of one entry point for ranks of one shape."""

    prepare: Fragment
    embed: Fragment
    norm: Fragment
    rows: Fragment | None
    """Of the pages to read; None where attention walks them."""
    held_rows: Fragment | None
    """Of the pages to write, in decode, where attention reads what nobody wrote."""
    write: Fragment
    mix: Fragment | None
    """None where attention walks the pages: `PageAttention` and `PrefillAttention`."""
    add: Fragment
    """Residual stream plus the partial sum of every rank."""
    total: Fragment
    """The partial embeddings of every rank."""
    last_rows: Fragment
    best: Fragment


@dataclass(frozen=True, kw_only=True)
class FragmentTracer:
    """Traces what entry points ask for into one library; equal requests are traced once."""

    library: FragmentLibrary
    config: ModelConfig
    page_size: int
    dtype: str
    form: AttentionForm
    tp: int
    quantized: bool = False
    """The embedding is i8 and has scales."""

    def trace(self, entry: EntryPoint, rank: RankShape) -> RankFragments:
        """All fragments of `entry` for `rank`."""
        config, n, page = self.config, entry.batch_size, self.page_size
        dtype = DTYPES[self.dtype]
        prefill = entry.phase == "prefill"
        walks = self.form == "matmul" and walks_pages(page, config.head_dim)
        seq = DynamicDim(name="seq_pages", multiple=page) if prefill else 1
        rows = DynamicDim(name="seq_pages", multiple=page * n) if prefill else n
        pages = DynamicDim(name="seq_pages") if prefill else 1
        keys = DynamicDim(name="table_pages", multiple=page)

        def ints(*dims: int | DynamicDim) -> TensorType:
            return TensorType(shape=dims, dtype=torch.int64)

        def floats(*dims: int | DynamicDim) -> TensorType:
            return TensorType(shape=dims, dtype=torch.float32)

        tokens, row, table = ints(n, seq), ints(n), ints(n, TABLE_PAGES)
        hidden = floats(rows, config.hidden_size)
        angles = floats(n, seq, config.head_dim // 2)
        mask = TensorType(shape=(n, seq, keys), dtype=torch.bool)
        step = (angles, angles, mask, ints(n, seq), ints(n, pages), row, table)
        norm_weight = TensorType(shape=(config.hidden_size,), dtype=dtype)
        table_dtype = torch.int8 if self.quantized else dtype
        embedding = TensorType(shape=(rank.vocab_size, config.hidden_size), dtype=table_dtype)
        scale = (floats(rank.vocab_size),) if self.quantized else ()
        q = floats(rows, rank.num_heads * config.head_dim)
        kv = floats(rows, rank.num_kv_heads * config.head_dim)
        elements = page_elements(rank.num_kv_heads, page, config.head_dim)
        cache = TensorType(shape=(POOL_PAGES, elements), dtype=dtype)

        heads = rank.num_kv_heads
        k_pages = TensorType(shape=(n, heads, TABLE_PAGES, page, config.head_dim), dtype=dtype)
        held = TensorType(shape=(n, heads, 1, page, config.head_dim), dtype=dtype)
        rotated = floats(n, seq, rank.num_heads, config.head_dim)
        rows_read = ints(DynamicDim(name="table_pages", multiple=n * heads))

        def write(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            step, (k_cache, v_cache, *held) = rest[:7], rest[7:]
            return llama.write(
                config,
                page,
                entry.phase,
                q,
                k,
                v,
                llama.Step(*step),
                k_cache,
                v_cache,
                held[0] if held else None,
            )

        trace, name = self.library.trace, entry.name
        return RankFragments(
            prepare=trace(
                f"{name}.prepare",
                lambda *a: tuple(llama.prepare(config, page, *a)),
                (tokens, row, row, table),
                step,
            ),
            embed=trace(
                f"{name}.embed.{rank.vocab_size}",
                lambda *a: llama.embed(*a),  # traced with the arguments that there are
                (tokens, ints(), embedding, *scale),
                (hidden,),
            ),
            norm=trace(
                f"{name}.norm",
                lambda x, weight: llama.norm(x, weight, config.rms_norm_eps),
                (hidden, norm_weight),
                (hidden,),
            ),
            rows=None
            if walks
            else trace(
                f"{name}.rows.{heads}", lambda p: head_rows(p, heads), (table,), (rows_read,)
            ),
            held_rows=None
            if prefill or walks
            else trace(
                f"{name}.held_rows.{heads}",
                lambda p: head_rows(p, heads),
                (ints(n, 1),),
                (ints(n * heads),),
            ),
            write=trace(
                f"{name}.write.{rank.num_heads}.{heads}",
                write,
                (q, kv, kv, *step, cache, cache, *(() if prefill or walks else (held,))),
                (rotated, cache, cache),
            ),
            mix=None
            if walks
            else trace(
                f"{name}.mix.{rank.num_heads}.{heads}",
                lambda *a: llama.mix(self.form, *a),
                (rotated, k_pages, k_pages, mask),
                (q,),
            ),
            add=trace(f"{name}.add", llama.add_partials, (hidden,) * (self.tp + 1), (hidden,)),
            total=trace(f"{name}.total", llama.add_partials, (hidden,) * self.tp, (hidden,)),
            last_rows=trace(
                f"{name}.last_rows",
                llama.last_rows,
                (hidden, row, row),
                (floats(n, config.hidden_size),),
            ),
            best=trace(f"{name}.best", llama.best, (floats(n, config.vocab_size),), (ints(n),)),
        )

    def trace_sums(self, function: Function) -> Fragment:
        """`llama.softmax_sums`."""
        n, vocab_size = function.batch_size, self.config.vocab_size
        row = TensorType(shape=(n,), dtype=torch.float32)
        blocks = -(-vocab_size // SUM_BLOCK)
        return self.library.trace(
            f"{function.name}.sums",
            lambda *a: llama.softmax_sums(SUM_BLOCK, *a),
            (
                TensorType(shape=(n, vocab_size), dtype=torch.float32),
                row.with_dtype(torch.int64),
                row,
            ),
            (TensorType(shape=(n, blocks), dtype=torch.float32),),
        )
