"""Which part of which parameter each rank holds: tensor parallelism as data.

    column_parallel   attn_q attn_k attn_v ffn_gate ffn_up   weight and bias by rows (dim 0)
    row_parallel      attn_output ffn_down                   weight by columns (1), bias on rank 0
    vocab_parallel    token_embd output                      by rows of the vocabulary (dim 0)
    replicated        attn_norm ffn_norm output_norm         whole on every rank

Quantized, each of these matrices has a scale for each of its rows (`quantize.py`): split with them
where they are split, replicated where columns are.

Vocab-parallel embedding: a rank looks up the rows it holds, gives zeros for the others, and the sum
over ranks is all-reduced. A tied model takes the rank's shard of token_embd for its part of the
logits.

Every tp from 1 to 8 works wherever each rank gets at least one query head, MLP column and vocab
row:

- tp <= num_kv_heads: whole groups (a kv head with its query heads) are dealt out, the first ranks
  getting one more where they do not divide. 9 query and 3 kv heads at tp2: (6q, 2kv), (3q, 1kv).
- tp > num_kv_heads: rank r holds kv head floor(r * num_kv_heads / tp), so each kv head is copied to
  the floor or ceil of tp / num_kv_heads ranks, which share its query heads; again the first ones
  take one more. 9 and 3 at tp5: query heads 2, 1, 2, 1, 3 on kv heads 0, 0, 1, 1, 2.

So inside a rank all kv heads serve equally many query heads, and grouped attention stays uniform.
MLP columns and vocab rows come in tiles of 16 (what matrix units and vector registers like), so
ranks differ by at most one tile; with fewer than 16 tiles a rank that unevenness would cost more
than alignment gains, and the tile is 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shark_llm.artifacts.manifest import Placement, Replicate, Split
from shark_llm.errors import ShardingError
from shark_llm.model.config import ModelConfig

MAX_TP = 8
TILE = 16
MIN_TILES = 16  # tiles per rank from which on unevenness (at most 1 / MIN_TILES) is worth alignment


@dataclass(frozen=True, kw_only=True)
class RankShape:
    """What one rank holds. Every range is contiguous and counts in the whole model's numbers."""

    rank: int
    heads: range
    """Query heads."""
    kv_heads: range
    intermediate: range
    """MLP columns: rows of ffn_gate and ffn_up, columns of ffn_down."""
    vocab: range
    """Rows of token_embd and output."""
    has_row_biases: bool
    """Whether the biases of attn_output and ffn_down (where the model has them) are added here:
    only on rank 0, so that the all-reduced sum has them once."""

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def num_kv_heads(self) -> int:
        return len(self.kv_heads)

    @property
    def intermediate_size(self) -> int:
        return len(self.intermediate)

    @property
    def vocab_size(self) -> int:
        return len(self.vocab)


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """A parameter as one rank sees it."""

    key: str
    """Its name in the archives: see `parameter_key`."""
    shape: tuple[int, ...]
    """The shape of what the rank holds."""
    dtype: str
    """In the archives: f32, f16, bf16 or i8."""


def shape_key(rank: RankShape) -> tuple[int, int, int, int, bool]:
    """Ranks with equal keys run the same fragment: only parameters and vocab offset differ.

    (num_heads, num_kv_heads, intermediate_size, vocab_size, has_row_biases).
    """
    return (
        rank.num_heads,
        rank.num_kv_heads,
        rank.intermediate_size,
        rank.vocab_size,
        rank.has_row_biases,
    )


def supported_tps(config: ModelConfig) -> tuple[int, ...]:
    """The tp values that give every rank a query head, an MLP column and a vocab row."""
    limit = min(MAX_TP, config.num_heads, config.intermediate_size, config.vocab_size)
    return tuple(range(1, limit + 1))


def plan_ranks(config: ModelConfig, tp: int) -> tuple[RankShape, ...]:
    """Deal heads, MLP columns and vocab rows out to `tp` ranks.

    Raises ShardingError when tp is not one of `supported_tps(config)`, or the query heads are not a
    multiple of the kv heads.
    """
    if config.num_heads % config.num_kv_heads:
        raise ShardingError(
            f"{config.num_heads} query heads are not a multiple of {config.num_kv_heads} kv heads: "
            "grouped attention needs equal groups; check num_attention_heads and "
            "num_key_value_heads in config.json"
        )
    works = supported_tps(config)
    if tp not in works:
        raise ShardingError(
            f"tp {tp} cannot split this model ({config.num_heads} query heads, "
            f"{config.intermediate_size} MLP columns, {config.vocab_size} vocab rows; each rank "
            f"needs one of each, and tp is at most {MAX_TP}); tp values that work: "
            f"{', '.join(map(str, works))}"
        )
    heads = _deal_heads(config.num_heads, config.num_kv_heads, tp)
    columns = _deal_tiled(config.intermediate_size, tp)
    rows = _deal_tiled(config.vocab_size, tp)
    has_biases = config.attention_bias or config.mlp_bias
    return tuple(
        RankShape(
            rank=rank,
            heads=heads[rank][0],
            kv_heads=heads[rank][1],
            intermediate=columns[rank],
            vocab=rows[rank],
            has_row_biases=has_biases and rank == 0,
        )
        for rank in range(tp)
    )


def plan_parameters(
    config: ModelConfig, tp: int, *, quantized: bool = False
) -> dict[str, Placement]:
    """The placement of every parameter, in the order of the archives; `quantized`: and of scales.

    At tp 1 all is Replicate: there is one archive, model.irpa, and keys are plain names.
    The bias of a row-parallel weight is Split along dim 0 with an empty range for all ranks but 0:
    a rank with an empty range has no such parameter. Raises ShardingError as `plan_ranks` does.
    """
    plan = _plan_weights(config, tp)
    if not quantized:
        return plan
    with_scales: dict[str, Placement] = {}
    for name, shape in parameter_shapes(config).items():
        placement = with_scales[name] = plan[name]
        if len(shape) == 2:
            by_rows = isinstance(placement, Split) and placement.dim == 0
            with_scales[scale_name(name)] = placement if by_rows else Replicate()
    return with_scales


def is_quantized(plan: Mapping[str, Placement]) -> bool:
    """Whether matrices are i8 and have scales."""
    return scale_name("token_embd.weight") in plan


def scale_name(weight: str) -> str:
    """`blk.0.attn_q.scale`: of the scales of the matrix `blk.0.attn_q.weight`."""
    return f"{weight.removesuffix('.weight')}.scale"


def _plan_weights(config: ModelConfig, tp: int) -> dict[str, Placement]:
    ranks = plan_ranks(config, tp)
    if tp == 1:
        return dict.fromkeys(parameter_shapes(config), Replicate())

    def split(dim: int, ranges: list[range], unit: int = 1) -> Split:
        return Split(dim=dim, ranges=tuple((r.start * unit, r.stop * unit) for r in ranges))

    heads = [rank.heads for rank in ranks]
    kv_heads = [rank.kv_heads for rank in ranks]
    columns = [rank.intermediate for rank in ranks]
    vocab = split(0, [rank.vocab for rank in ranks])
    rank_0 = split(0, [range(config.hidden_size if r == 0 else 0) for r in range(tp)])
    of_block: dict[str, Placement] = {
        "attn_norm.weight": Replicate(),
        "attn_output.weight": split(1, heads, config.head_dim),
        "attn_output.bias": rank_0,
        "ffn_norm.weight": Replicate(),
        "ffn_down.weight": split(1, columns),
        "ffn_down.bias": rank_0,
    }
    for kind in ("weight", "bias"):
        of_block[f"attn_q.{kind}"] = split(0, heads, config.head_dim)
        of_block[f"attn_k.{kind}"] = split(0, kv_heads, config.head_dim)
        of_block[f"attn_v.{kind}"] = split(0, kv_heads, config.head_dim)
        of_block[f"ffn_gate.{kind}"] = split(0, columns)
        of_block[f"ffn_up.{kind}"] = split(0, columns)
    of_model: dict[str, Placement] = {
        "token_embd.weight": vocab,
        "output.weight": vocab,
        "output_norm.weight": Replicate(),
    }

    def place(name: str) -> Placement:
        if name.startswith("blk."):
            return of_block[name.split(".", 2)[2]]
        return of_model[name]

    return {name: place(name) for name in parameter_shapes(config)}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the whole model with its shape, in the order the model uses them.

    `output.weight` is absent when embeddings are tied. Weights are (out, in), as in PyTorch.
    """
    hidden, mlp = config.hidden_size, config.intermediate_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim

    def linear(name: str, out: int, in_: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (out, in_)
        if bias:
            yield f"{name}.bias", (out,)

    def parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "token_embd.weight", (config.vocab_size, hidden)
        for i in range(config.num_layers):
            yield f"blk.{i}.attn_norm.weight", (hidden,)
            yield from linear(f"blk.{i}.attn_q", q, hidden, config.attention_bias)
            yield from linear(f"blk.{i}.attn_k", kv, hidden, config.attention_bias)
            yield from linear(f"blk.{i}.attn_v", kv, hidden, config.attention_bias)
            yield from linear(f"blk.{i}.attn_output", hidden, q, config.attention_bias)
            yield f"blk.{i}.ffn_norm.weight", (hidden,)
            yield from linear(f"blk.{i}.ffn_gate", mlp, hidden, config.mlp_bias)
            yield from linear(f"blk.{i}.ffn_up", mlp, hidden, config.mlp_bias)
            yield from linear(f"blk.{i}.ffn_down", hidden, mlp, config.mlp_bias)
        yield "output_norm.weight", (hidden,)
        if not config.tie_word_embeddings:
            yield "output.weight", (config.vocab_size, hidden)

    return dict(parameters())


def parameter_key(name: str, placement: Placement, rank: int) -> str:
    """The name in the archives: they all share one scope, so a shard's name carries its rank."""
    return name if isinstance(placement, Replicate) else f"{name}.rank{rank}"


def local_parameters(
    config: ModelConfig, plan: Mapping[str, Placement], rank: int, dtype: str
) -> dict[str, LocalParameter]:
    """Every parameter that rank `rank` uses, by our plain name: shared ones whole, split ones cut.

    `dtype` is that of all that is not quantized. Parameters whose range is empty on this rank are
    left out.
    """
    local = {}
    for name, (shape, own_dtype) in stored_parameters(config, plan, dtype).items():
        placement = plan[name]
        cut = local_shape(shape, placement, rank)
        if math.prod(cut):
            key = parameter_key(name, placement, rank)
            local[name] = LocalParameter(key=key, shape=cut, dtype=own_dtype)
    return local


def stored_parameters(
    config: ModelConfig, plan: Mapping[str, Placement], dtype: str
) -> dict[str, tuple[tuple[int, ...], str]]:
    """(whole shape, dtype) of all that the archives hold, in their order: a scale comes after its
    matrix."""
    stored: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in parameter_shapes(config).items():
        scale = scale_name(name)
        stored[name] = (shape, "i8" if scale in plan else dtype)
        if scale in plan:
            stored[scale] = (shape[:1], "f32")
    return stored


def local_shape(shape: tuple[int, ...], placement: Placement, rank: int) -> tuple[int, ...]:
    """The shape of what `rank` holds of a parameter whose whole shape is `shape`."""
    if isinstance(placement, Replicate):
        return shape
    start, stop = placement.ranges[rank]
    return (*shape[: placement.dim], stop - start, *shape[placement.dim + 1 :])


def _deal_heads(num_heads: int, num_kv_heads: int, tp: int) -> list[tuple[range, range]]:
    """(query heads, kv heads) of each rank: the rules of the module docstring."""
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        return [
            (range(kv.start * group, kv.stop * group), kv) for kv in _deal_evenly(num_kv_heads, tp)
        ]
    kv_of_rank = [rank * num_kv_heads // tp for rank in range(tp)]
    dealt = []
    for kv in range(num_kv_heads):
        for part in _deal_evenly(group, kv_of_rank.count(kv)):
            heads = range(kv * group + part.start, kv * group + part.stop)
            dealt.append((heads, range(kv, kv + 1)))
    return dealt


def _deal_tiled(size: int, tp: int) -> list[range]:
    """Deal `size` columns in whole tiles; the rest (less than a tile) goes to the last rank, which
    never has a tile more than others."""
    tile = TILE if size >= TILE * MIN_TILES * tp else 1
    dealt = [range(r.start * tile, r.stop * tile) for r in _deal_evenly(size // tile, tp)]
    dealt[-1] = range(dealt[-1].start, size)
    return dealt


def _deal_evenly(count: int, parts: int) -> list[range]:
    """Contiguous ranges whose sizes differ by at most one, larger ones first."""
    quotient, rest = divmod(count, parts)
    starts = [part * quotient + min(part, rest) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]
