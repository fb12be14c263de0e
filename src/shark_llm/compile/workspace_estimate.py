"""The workspace of a module before there is one: from the shapes of what a step holds at once.

`workspace.py` reads it from a compiled module; this says what to expect there. Buffers whose sizes
depend on the step share no place with those of other sizes, so that a layer's all count, and with
several ranks every partial sum stands on every rank until it is added. A prefill of M tokens in N
rows with C tokens of context holds on a rank

    keys      the gathered pages of K and V, or of K and K without what the mask hides: 2 N C K D
    mask      M C bytes; where a fused attention has one row alone, for each query head once more
    scores    A M C in f32, three times: as they are, masked, weighted; fused attention has none
    states    in f32: hidden states, norms and partial sums, q, k, v and what becomes of them; with
              gate and up in one piece where there is one rank

and a decode the same with one token a row, of the keys once more where attention is not fused. But
on CPUs both read pages of whole vectors where they lie, and hold states alone. The formulas follow
from the shapes in `model/llama.py`; how often each is held was read off modules.

How near it is: beside modules of Llama 3.1 8B for gfx942 (tp 1, 2, 8) and of 8B and SmolLM2 135M
for CPUs (tp 1, 2; tp 1, 2, 3), of 1 to 4 layers, in steps of 128 to 2048 tokens at contexts of 2048
to 131072, the estimate of a rank was 2 % too low to 30 % too high.

Legend: H hidden size, A query heads, K kv heads, D head_dim, I MLP columns, V vocabulary rows: each
what the rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from shark_llm.artifacts.irpa import DTYPE_BYTES
from shark_llm.compile.workspace import PREFILL_TOKENS
from shark_llm.export.page_attention import walks_pages
from shark_llm.export.signatures import ExportSettings
from shark_llm.model.config import ModelConfig
from shark_llm.model.llama import AttentionForm
from shark_llm.sharding.plan import RankShape


@dataclass(frozen=True, kw_only=True)
class ModuleShape:
    """What decides a module's workspace beside the model, tp, dtype and the context."""

    attention_form: AttentionForm = "fused"
    """That of the target: fused for GPUs, matmul for CPUs."""
    prefill_tokens: int = PREFILL_TOKENS
    """Of a step, in all its rows."""
    page_size: int = ExportSettings.page_size
    batch_sizes_prefill: tuple[int, ...] = ExportSettings.batch_sizes_prefill
    batch_sizes_decode: tuple[int, ...] = ExportSettings.batch_sizes_decode


def estimate_workspace(
    config: ModelConfig,
    rank: RankShape,
    *,
    tp: int,
    dtype: str,
    context_tokens: int,
    module: ModuleShape,
) -> int:
    """Bytes that the rank's device holds at most beside weights and caches, in any entry point.

    `context_tokens`: what every row's page table is for.
    """
    estimate = _Estimate(
        config=config,
        rank=rank,
        tp=tp,
        itemsize=DTYPE_BYTES[dtype],
        context=context_tokens,
        page_size=module.page_size,
        is_fused=module.attention_form == "fused",
    )
    return max(
        *(estimate.prefill(n, module.prefill_tokens) for n in module.batch_sizes_prefill),
        *(estimate.decode(n) for n in module.batch_sizes_decode),
    )


@dataclass(frozen=True, kw_only=True)
class _Estimate:
    config: ModelConfig
    rank: RankShape
    tp: int
    itemsize: int
    context: int
    page_size: int
    is_fused: bool

    def prefill(self, rows: int, tokens: int) -> int:
        """Of a step of `tokens` tokens in all its rows."""
        heads, page = self.rank.num_heads, self.page_size
        tokens = -(-tokens // (rows * page)) * rows * page
        if self._walks:
            return tokens * self._states()
        if not self.is_fused:
            pairs = 1 + 4 * heads * (3 if self.tp == 1 else 4)
        elif rows == 1:
            pairs = 1 + heads
        else:
            pairs = 1
        gathered = 2 * rows
        if self.tp > 1 and rows * self.rank.num_kv_heads == 1:
            gathered += self.tp  # the pages are then the rows to read, and no rank's own
        return tokens * (self.context * pairs + self._states()) + gathered * self._keys()

    def decode(self, rows: int) -> int:
        """Of a step of one token in each row."""
        logits = 2 * 4 * self.config.vocab_size
        if self._walks:
            return rows * (logits + self._states())
        heads = self.rank.num_heads
        keys = self._keys() + self.context * heads if self.is_fused else 3 * self._keys()
        scores = 0 if self.is_fused else self.context * 4 * 4 * heads
        return rows * (logits + self._states() + keys + scores)

    @property
    def _walks(self) -> bool:
        """Pages are read where they lie."""
        return not self.is_fused and walks_pages(self.page_size, self.config.head_dim)

    def _keys(self) -> int:
        """Of the gathered pages of one row in one cache."""
        return self.context * self.rank.num_kv_heads * self.config.head_dim * self.itemsize

    def _states(self) -> int:
        """Of what has the size of one token, all in f32."""
        attention = (3 * self.rank.num_heads + 4 * self.rank.num_kv_heads) * self.config.head_dim
        if self.tp > 1:
            hidden = (6 * self.tp + (4 if self._walks else 2)) * self.config.hidden_size
            return 4 * (attention + hidden)
        hidden = (3 if self.is_fused else 8 if self._walks else 15) * self.config.hidden_size
        return 4 * (attention + hidden + 2 * self.rank.intermediate_size)
