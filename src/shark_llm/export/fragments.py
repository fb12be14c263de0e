"""Which fragments an entry point needs, and their argument types: the model's functions made traceable.

Legend: N batch rows, S tokens of a row, T pages of a row's table, P pages of the pool, H hidden size,
M = N * S, L page size, F = head_dim / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shark_llm.artifacts.manifest import EntryPoint
from shark_llm.export.trace import DynamicDim, Fragment, FragmentLibrary, TensorType
from shark_llm.model import llama
from shark_llm.model.config import ModelConfig
from shark_llm.model.kv_cache import page_elements
from shark_llm.model.llama import AttentionForm
from shark_llm.sharding.plan import RankShape

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TABLE_PAGES = DynamicDim(name="table_pages")
POOL_PAGES = DynamicDim(name="pool_pages")


@dataclass(frozen=True, kw_only=True)
class RankFragments:
    """The fragments of one entry point for ranks of one shape."""

    prepare: Fragment
    embed: Fragment
    norm: Fragment
    attend: Fragment
    gate: Fragment
    add: Fragment
    """Residual stream plus the partial sum of every rank."""
    total: Fragment
    """The partial embeddings of every rank."""
    last_rows: Fragment


@dataclass(frozen=True, kw_only=True)
class FragmentTracer:
    """Traces what entry points ask for into one library; equal requests are traced once."""

    library: FragmentLibrary
    config: ModelConfig
    page_size: int
    dtype: str
    form: AttentionForm
    tp: int

    def trace(self, entry: EntryPoint, rank: RankShape) -> RankFragments:
        """All fragments of `entry` for `rank`."""
        config, n, page = self.config, entry.batch_size, self.page_size
        dtype = DTYPES[self.dtype]
        prefill = entry.phase == "prefill"
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
        step = (angles, angles, mask, ints(n, pages), row)
        norm_weight = TensorType(shape=(config.hidden_size,), dtype=dtype)
        embedding = TensorType(shape=(rank.vocab_size, config.hidden_size), dtype=dtype)
        q = floats(rows, rank.num_heads * config.head_dim)
        kv = floats(rows, rank.num_kv_heads * config.head_dim)
        elements = page_elements(rank.num_kv_heads, page, config.head_dim)
        cache = TensorType(shape=(POOL_PAGES, elements), dtype=dtype)
        columns = floats(rows, rank.intermediate_size)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            *step, table, k_cache, v_cache = rest
            return llama.attend(
                config,
                page,
                entry.phase,
                self.form,
                q,
                k,
                v,
                llama.Step(*step),
                table,
                k_cache,
                v_cache,
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
                llama.embed,
                (tokens, ints(), embedding),
                (hidden,),
            ),
            norm=trace(
                f"{name}.norm",
                lambda x, weight: llama.norm(x, weight, config.rms_norm_eps),
                (hidden, norm_weight),
                (hidden,),
            ),
            attend=trace(
                f"{name}.attend.{rank.num_heads}.{rank.num_kv_heads}",
                attend,
                (q, kv, kv, *step, table, cache, cache),
                (q, cache, cache),
            ),
            gate=trace(
                f"{name}.gate.{rank.intermediate_size}",
                llama.gate,
                (columns, columns),
                (columns,),
            ),
            add=trace(f"{name}.add", llama.add_partials, (hidden,) * (self.tp + 1), (hidden,)),
            total=trace(f"{name}.total", llama.add_partials, (hidden,) * self.tp, (hidden,)),
            last_rows=trace(
                f"{name}.last_rows",
                llama.last_rows,
                (hidden, row, row),
                (floats(n, config.hidden_size),),
            ),
        )
