"""Prefill attention straight from the pages of the caches, as one dispatch of vector code.

Composed of whole-tensor operations, attention of a prompt is a gather of all pages, two products
over all keys whether a query may see them or not, and five passes over scores of the size of their
number squared. Here a workgroup has some tokens of one row and query heads of one kv head, and
walks the pages that its last token may see, as in Dao et al., "FlashAttention" (arXiv:2205.14135):

    for each chunk of C keys:
        scores = k q^T                          (C, R)
        peak'  = max(peak, scores)
        scores = exp(scores - peak')
        total  = total * exp(peak - peak') + sum of scores
        mixed  = mixed * exp(peak - peak') + v^T scores     (D, R)
    result = (mixed / total)^T

That is written in `prefill_walk.py`; here stands what surrounds it.

What a page holds beyond the last token of a workgroup is never used, whatever it is. Values of that
token and those before it have to be finite: queries that do not see them multiply them by 0.

Legend: P pages of the pool, N batch rows, S tokens of a row in this step, T pages of a row's table,
K local kv heads, A local query heads, L page size, D head_dim, R queries of a workgroup: Q tokens
times G heads, C keys of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shark_llm.export.kernel import Operand, kernel
from shark_llm.export.prefill_walk import MAX_ELEMENTS, MAX_QUERIES, PrefillWalk
from shark_llm.export.tiling import largest_divisor
from shark_llm.export.vector_writer import LOAD, READ, STORE, VECTOR, WRITE

MAX_TOKENS = 16


@dataclass
class PrefillAttention:
    """The attention functions that a module needs, each written once."""

    dtype: str
    page_size: int
    head_dim: int
    functions: dict[str, str] = field(default_factory=dict)

    def function(self, batch_size: int, num_heads: int, num_kv_heads: int) -> str:
        """The symbol of a function (q (N, S, A, D) f32, read_pages (N, T) i64, visible (N, S) i64,
        caches of keys and of values (P, K*L*D)) -> (N*S, A*D) f32.

        S is a multiple of L. A token sees the first `visible` tokens, at least one, of the row's
        `read_pages`. Of padding, which sees as much as the token before it, the result is finite.
        """
        name = f"attend_prefill.{batch_size}x{num_heads}x{num_kv_heads}"
        if name not in self.functions:
            tokens = min(self.page_size, MAX_TOKENS)
            queries = min(MAX_QUERIES, MAX_ELEMENTS // self.head_dim)
            walk = PrefillWalk(
                dtype=self.dtype,
                page_size=self.page_size,
                head_dim=self.head_dim,
                num_kv_heads=num_kv_heads,
                tokens=tokens,
                heads=largest_divisor(num_heads // num_kv_heads, max(1, queries // tokens)),
            )
            self.functions[name] = _function(name, batch_size, num_heads, walk)
        return name


def _function(name: str, n: int, heads: int, walk: PrefillWalk) -> str:
    """The whole function, of which one dispatch does `walk` for each block of queries."""
    d, width = walk.head_dim, walk.heads * walk.head_dim
    blocks = heads // walk.heads
    per_kv_head = blocks // walk.num_kv_heads
    q = f"tensor<{n}x?x{heads}x{d}xf32>"
    joined = f"tensor<{n}x?x{heads * d}xf32>"
    split = f"tensor<{n}x?x{blocks}x{width}xf32>"
    result = f"tensor<?x{heads * d}xf32>"
    ints, cache = f"tensor<{n}x?xi64>", walk.cache
    own = (
        f"offsets = [%row, %start, %block, 0], sizes = [1, {walk.tokens}, 1, {width}], "
        f"strides = [1, 1, 1, 1]"
    )
    result_tile = walk.result()
    inputs = (
        Operand(name="%all_q", tensor=split, dims=("%seq",)),
        Operand(name="%all_pages", tensor=ints, dims=("%table_pages",)),
        Operand(name="%all_visible", tensor=ints, dims=("%seq",)),
        Operand(name="%all_k", tensor=cache, dims=("%pool",)),
        Operand(name="%all_v", tensor=cache, dims=("%pool",)),
    )
    work = f"""
{walk.writer.declared}
    %zero = arith.constant 0.0 : f32
    %narrow_zero = arith.constant 0.0 : {walk.dtype}
    %zeros = arith.constant dense<0.0> : {VECTOR}
    %lowest = arith.constant dense<-3.0e38> : {VECTOR}
    %unseen = arith.constant dense<0xFF800000> : {VECTOR}
    %scale = arith.constant dense<{d**-0.5!r}> : {VECTOR}
    %tile = flow.dispatch.workgroup.id[0] : index
    %block = flow.dispatch.workgroup.id[1] : index
    %row = flow.dispatch.workgroup.id[2] : index
    %per_kv_head = arith.constant {per_kv_head} : index
    %head = arith.divui %block, %per_kv_head : index
    %head_size = arith.constant {walk.page_size * d} : index
    %head_start = arith.muli %head, %head_size : index
    %tokens_here = arith.constant {walk.tokens} : index
    %start = arith.muli %tile, %tokens_here : index
    %none = arith.constant 0 : index
    %one = arith.constant 1 : index
    %before = arith.subi %start, %one : index
    %no_tile_before = arith.cmpi eq, %start, %none : index
    %previous = arith.select %no_tile_before, %none, %before : index
    %q = {LOAD} %all_q, {own} : {READ}{split}>{{%seq}} -> {walk.tile}
    %pages = {LOAD} %all_pages, offsets = [%row, 0], sizes = [1, %table_pages], strides = [1, 1]
        : {READ}{ints}>{{%table_pages}} -> tensor<?xi64>
    %seen = {LOAD} %all_visible, offsets = [%row, %start], sizes = [1, {walk.tokens}],
        strides = [1, 1] : {READ}{ints}>{{%seq}} -> tensor<{walk.tokens}xi64>
    %seen_before = {LOAD} %all_visible, offsets = [%row, %previous], sizes = [1, 1],
        strides = [1, 1] : {READ}{ints}>{{%seq}} -> tensor<1xi64>
    %last_token = arith.constant {walk.tokens - 1} : index
    %most_i64 = tensor.extract %seen[%last_token] : tensor<{walk.tokens}xi64>
    %least_i64 = tensor.extract %seen[%none] : tensor<{walk.tokens}xi64>
    %before_i64 = tensor.extract %seen_before[%none] : tensor<1xi64>
    // A tile whose first token sees no more than the one before it is padding alone: it walks one
    // chunk, for numbers that are finite.
    %most = arith.index_cast %most_i64 : i64 to index
    %page_size = arith.constant {walk.page_size} : index
    %held = arith.muli %table_pages, %page_size : index
    %reach = arith.minui %most, %held : index
    %chunk = arith.constant {walk.chunk} : index
    %short = arith.minui %reach, %chunk : index
    %same = arith.cmpi eq, %least_i64, %before_i64 : i64
    %true = arith.constant true
    %tile_before = arith.xori %no_tile_before, %true : i1
    %is_padding = arith.andi %same, %tile_before : i1
    %length = arith.select %is_padding, %short, %reach : index
    %chunks = arith.ceildivui %length, %chunk : index
    %no_token = arith.constant 0 : i64
{walk.writer.text}
    {STORE} {result_tile}, %all_mixed, {own} : {walk.tile} -> {WRITE}{split}>{{%seq}}"""
    executable = kernel(
        f"{name}.kernel",
        inputs=inputs,
        sizes=("%seq", "%pool", "%table_pages"),
        output=Operand(name="%all_mixed", tensor=split, dims=("%seq",)),
        grid=3,
        lines=work,
    )
    return f"""
{executable}
func.func private @{name}(%queries: {q}, %read_pages: {ints}, %visible: {ints},
    %k_cache: {cache}, %v_cache: {cache}) -> {result} {{
  %axis0 = arith.constant 0 : index
  %axis1 = arith.constant 1 : index
  %n = arith.constant {n} : index
  %blocks = arith.constant {blocks} : index
  %tokens = arith.constant {walk.tokens} : index
  %s = tensor.dim %queries, %axis1 : {q}
  %p = tensor.dim %k_cache, %axis0 : {cache}
  %t = tensor.dim %read_pages, %axis1 : {ints}
  %tiles = arith.divui %s, %tokens : index
  %joined = tensor.collapse_shape %queries [[0], [1], [2, 3]] : {q} into {joined}
  %split = tensor.expand_shape %joined [[0], [1], [2, 3]]
      output_shape [{n}, %s, {blocks}, {width}] : {joined} into {split}
  %mixed = flow.dispatch @{name}.kernel::@{name}.kernel[%tiles, %blocks, %n](
      %split, %read_pages, %visible, %k_cache, %v_cache, %s, %p, %t)
      : ({split}{{%s}}, {ints}{{%t}}, {ints}{{%s}}, {cache}{{%p}}, {cache}{{%p}},
         index, index, index) -> {split}{{%s}}
  %all = tensor.collapse_shape %mixed [[0, 1], [2, 3]] : {split} into {result}
  return %all : {result}
}}"""
