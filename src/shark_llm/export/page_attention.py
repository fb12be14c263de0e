"""Decode attention straight from the pages of the caches, as one dispatch of vector code.

Composed of whole-tensor operations, attention of one token a row is a gather of all pages, two
products that cannot be tiled through the gather, and four passes over the scores. Here nothing is
gathered: a workgroup has one row and query heads of one kv head, walks the row's live pages, and
rescales what it has so far, as in Milakov and Gimelshein, "Online normalizer calculation for
softmax" (arXiv:1805.02867):

    for each chunk of C tokens:
        scores = scale * q k^T                  (G, C)
        peak'  = max(peak, scores)
        scores = exp(scores - peak')
        total  = total * exp(peak - peak') + sum of scores
        mixed  = mixed * exp(peak - peak') + scores v
    result = mixed / total

What a page holds beyond the row's last token is never used, whatever it is.

Pages lie anywhere in memory, where no hardware looks ahead. So a chunk begins by reading an element
of each cache line of the next: many lines are then on their way at once, and that chunk waits for
none of them. What is not in the processor's caches yet takes a quarter less time so.

Inner loops keep up to 12 sums in the 16 registers of AVX2. They are loops, not unrolled: of one
block with all operations of a chunk, the compiler spills most.

Legend: P pages of the pool, N batch rows, T pages of a row's table, K local kv heads, A local query
heads, L page size, D head_dim, G query heads of a workgroup, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shark_llm.export.kernel import Operand, kernel
from shark_llm.export.prefill_walk import MAX_HEAD_DIM
from shark_llm.export.tiling import largest_divisor
from shark_llm.export.vector_writer import (
    LANES,
    LOAD,
    READ,
    ROTATIONS,
    STORE,
    VECTOR,
    WRITE,
    VectorWriter,
)

MAX_SUMS = 12
"""Sums that an inner loop keeps in registers; the others hold operands."""
MAX_CHUNK = 32
CACHE_LINE = 64
"""Bytes."""
MAX_HEADS = 8
"""Query heads of a workgroup: each chunk is read and widened to f32 once for all of them."""


def walks_pages(page_size: int, head_dim: int) -> bool:
    """Whether tokens of a page and columns of a head fill vectors, and the buffer of prefill fits a
    thread's stack: what both forms need."""
    return page_size % LANES == 0 and head_dim % LANES == 0 and head_dim <= MAX_HEAD_DIM


@dataclass
class PageAttention:
    """The attention functions that a module needs, each written once."""

    dtype: str
    page_size: int
    head_dim: int
    functions: dict[str, str] = field(default_factory=dict)

    def function(self, batch_size: int, num_heads: int, num_kv_heads: int) -> str:
        """The symbol of a function (q (N, 1, A, D) f32, read_pages (N, T) i64, visible (N, 1) i64,
        caches of keys and of values (P, K*L*D)) -> (N, A*D) f32.

        A row sees the first `visible` tokens, at least one, of its `read_pages`.
        """
        name = f"attend_pages.{batch_size}x{num_heads}x{num_kv_heads}"
        if name not in self.functions:
            group = num_heads // num_kv_heads
            walk = _Kernel(
                dtype=self.dtype,
                page_size=self.page_size,
                head_dim=self.head_dim,
                batch_size=batch_size,
                num_kv_heads=num_kv_heads,
                group=group,
                heads=largest_divisor(group, MAX_HEADS),
            )
            self.functions[name] = walk.text(name)
        return name


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    dtype: str
    page_size: int
    head_dim: int
    batch_size: int
    num_kv_heads: int
    group: int
    """Query heads of a kv head."""
    heads: int
    """G."""
    writer: VectorWriter = field(default_factory=VectorWriter)

    @property
    def chunk(self) -> int:
        assert self.page_size % min(self.page_size, MAX_CHUNK) == 0, "pages are powers of two"
        return min(self.page_size, MAX_CHUNK)

    @property
    def vectors(self) -> int:
        """Of the D columns of a head."""
        return self.head_dim // LANES

    @property
    def cache(self) -> str:
        row = self.num_kv_heads * self.page_size * self.head_dim
        return f"tensor<?x{row}x{self.dtype}>"

    @property
    def tokens(self) -> str:
        """The type of a chunk of keys or values: (C, D), flat."""
        return f"tensor<{self.chunk * self.head_dim}x{self.dtype}>"

    @property
    def bits(self) -> str:
        """An integer as wide as an element of a cache."""
        return "i32" if self.dtype == "f32" else "i16"

    @property
    def queries(self) -> str:
        """The type of the workgroup's queries, and of its result: (G, D), flat."""
        return f"tensor<{self.heads * self.head_dim}xf32>"

    @property
    def scores(self) -> str:
        """The type of (G, C), flat."""
        return f"tensor<{self.heads * self.chunk}xf32>"

    def text(self, name: str) -> str:
        """The whole function."""
        n, width, d = self.batch_size, self.heads * self.head_dim, self.head_dim
        per_kv_head = self.group // self.heads
        blocks = self.num_kv_heads * per_kv_head  # workgroups of a row
        q = f"tensor<{n}x1x{blocks * self.heads}x{d}xf32>"
        flat, split = f"tensor<{n}x{blocks * width}xf32>", f"tensor<{n}x{blocks}x{width}xf32>"
        table, visible, cache = f"tensor<{n}x?xi64>", f"tensor<{n}x1xi64>", self.cache
        own = f"offsets = [%row, %block, 0], sizes = [1, 1, {width}], strides = [1, 1, 1]"
        result = self._walk()
        inputs = (
            Operand(name="%all_q", tensor=split),
            Operand(name="%all_pages", tensor=table, dims=("%table_pages",)),
            Operand(name="%all_visible", tensor=visible),
            Operand(name="%all_k", tensor=cache, dims=("%pool",)),
            Operand(name="%all_v", tensor=cache, dims=("%pool",)),
        )
        work = f"""
{self.writer.declared}
    %zero = arith.constant 0.0 : f32
    %narrow_zero = arith.constant 0.0 : {self.dtype}
    %zeros = arith.constant dense<0.0> : {VECTOR}
    %lowest = arith.constant dense<-3.0e38> : {VECTOR}
    %unseen = arith.constant dense<0xFF800000> : {VECTOR}
    %scale = arith.constant dense<{d**-0.5!r}> : {VECTOR}
    %block = flow.dispatch.workgroup.id[0] : index
    %row = flow.dispatch.workgroup.id[1] : index
    %per_kv_head = arith.constant {per_kv_head} : index
    %head = arith.divui %block, %per_kv_head : index
    %head_size = arith.constant {self.page_size * d} : index
    %head_start = arith.muli %head, %head_size : index
    %q = {LOAD} %all_q, {own} : {READ}{split}> -> {self.queries}
    %pages = {LOAD} %all_pages, offsets = [%row, 0], sizes = [1, %table_pages], strides = [1, 1]
        : {READ}{table}>{{%table_pages}} -> tensor<?xi64>
    %lengths = {LOAD} %all_visible, offsets = [0, 0], sizes = [{n}, 1], strides = [1, 1]
        : {READ}{visible}> -> {visible}
    %first = arith.constant 0 : index
    %length_i64 = tensor.extract %lengths[%row, %first] : {visible}
    %told = arith.index_cast %length_i64 : i64 to index
    %page_size = arith.constant {self.page_size} : index
    %held = arith.muli %table_pages, %page_size : index
    %length = arith.minui %told, %held : index
    %chunk = arith.constant {self.chunk} : index
    %chunks = arith.ceildivui %length, %chunk : index
    %one = arith.constant 1 : index
    %last = arith.subi %chunks, %one : index
    %no_bits = arith.constant 0 : {self.bits}
    %far = arith.constant 62 : i64
    %always_0 = arith.shrui %length_i64, %far : i64
    %never = arith.trunci %always_0 : i64 to {self.bits}
{self.writer.text}
    {STORE} {result}, %all_mixed, {own} : {self.queries} -> {WRITE}{split}>"""
        executable = kernel(
            f"{name}.kernel",
            inputs=inputs,
            sizes=("%pool", "%table_pages"),
            output=Operand(name="%all_mixed", tensor=split),
            grid=2,
            lines=work,
        )
        return f"""
{executable}
func.func private @{name}(%queries: {q}, %read_pages: {table}, %visible: {visible},
    %k_cache: {cache}, %v_cache: {cache}) -> {flat} {{
  %axis0 = arith.constant 0 : index
  %axis1 = arith.constant 1 : index
  %n = arith.constant {n} : index
  %blocks = arith.constant {blocks} : index
  %p = tensor.dim %k_cache, %axis0 : {cache}
  %t = tensor.dim %read_pages, %axis1 : {table}
  %flat = tensor.collapse_shape %queries [[0, 1], [2, 3]] : {q} into {flat}
  %split = tensor.expand_shape %flat [[0], [1, 2]] output_shape [{n}, {blocks}, {width}]
      : {flat} into {split}
  %mixed = flow.dispatch @{name}.kernel::@{name}.kernel[%blocks, %n](
      %split, %read_pages, %visible, %k_cache, %v_cache, %p, %t)
      : ({split}, {table}{{%t}}, {visible}, {cache}{{%p}}, {cache}{{%p}}, index, index) -> {split}
  %joined = tensor.collapse_shape %mixed [[0], [1, 2]] : {split} into {flat}
  return %joined : {flat}
}}"""

    def _walk(self) -> str:
        """All chunks in turn; returns the workgroup's result."""
        w, heads, vectors = self.writer, self.heads, self.vectors
        sums = heads * (1 + vectors)  # totals and mixed values, from 0
        state = ["%lowest"] * heads + ["%zeros"] * sums
        state += [w.let(f"tensor.empty() : {self.scores}"), "%no_bits"]
        types = [VECTOR] * (heads + sums) + [self.scores, self.bits]
        bounds = (w.index(0), "%chunks", w.index(1))
        state = w.loop(bounds, state, types, self._chunk)
        totals, mixed = state[heads : 2 * heads], state[2 * heads : -2]
        # What was read ahead has to count for something, or the compiler would not read it: it is
        # added as a 0 that only shows when the program runs.
        bits = w.let(f"arith.andi {state[-1]}, %never : {self.bits}")
        nothing = w.let(f"arith.uitofp {bits} : {self.bits} to f32")
        nothing = w.let(f"vector.broadcast {nothing} : f32 to {VECTOR}")
        totals = [w.binary("addf", total, nothing) for total in totals]
        result = w.let(f"tensor.empty() : {self.queries}")
        for i, value in enumerate(mixed):
            head = i // vectors
            if i % vectors == 0:
                for rotation in ROTATIONS:
                    total = totals[head]
                    totals[head] = w.binary("addf", total, w.shuffle(total, total, rotation))
            quotient = w.binary("divf", value, totals[head])
            result = w.store(quotient, result, self.queries, w.index(i * LANES))
        return result

    def _chunk(self, number: str, state: list[str]) -> list[str]:
        """The state after one chunk: peaks (G), totals (G), mixed (G * D / 8), a buffer for scores,
        the bits read ahead.

        Every lane of a peak is the peak; the lanes of a total are yet to be added.
        """
        w, heads = self.writer, self.heads
        peaks, totals, mixed = state[:heads], state[heads : 2 * heads], state[2 * heads : -2]
        bits = self._read_ahead(number, state[-1])
        keys, values = self._locate(number)
        left = w.let(f"arith.subi %length, {w.times(number, self.chunk)} : index")
        live = w.let(f"arith.minui {left}, %chunk : index")
        buffer = self._scores(keys, state[-2])
        peaks, exponents = self._rescale(buffer, live, peaks)
        # The factors of all heads in one vector: one exp, where the compiler would make each of
        # equal lanes a scalar one.
        steps = [w.binary("subf", a, b) for a, b in zip(state[:heads], peaks, strict=True)]
        joined = steps[0]
        for head, step in enumerate(steps[1:], 1):
            joined = w.shuffle(joined, step, [*range(head), *range(LANES + head, 2 * LANES)])
        joined = w.exp(joined)
        factors = [w.splat(joined, head) for head in range(heads)]
        for head in range(heads):
            totals[head] = w.binary("mulf", totals[head], factors[head])
            for i, exponent in enumerate(exponents[head]):
                weight = w.exp(exponent)
                totals[head] = w.binary("addf", totals[head], weight)
                at = w.index(head * self.chunk + i * LANES)
                buffer = w.store(weight, buffer, self.scores, at)
        mixed = self._mix(values, buffer, live, mixed, factors)
        return [*peaks, *totals, *mixed, buffer, bits]

    def _read_ahead(self, number: str, bits: str) -> str:
        """`bits` or'ed with one element of every cache line of the next chunk."""
        w = self.writer
        following = w.let(f"arith.addi {number}, %one : index")
        following = w.let(f"arith.minui {following}, %last : index")
        line = CACHE_LINE // (4 if self.dtype == "f32" else 2)
        for tokens in self._locate(following):
            for at in range(0, self.chunk * self.head_dim, line):
                element = w.let(f"tensor.extract {tokens}[{w.index(at)}] : {self.tokens}")
                element = w.let(f"arith.bitcast {element} : {self.dtype} to {self.bits}")
                bits = w.let(f"arith.ori {bits}, {element} : {self.bits}")
        return bits

    def _locate(self, number: str) -> list[str]:
        """Keys and values of a chunk."""
        w, size = self.writer, self.chunk * self.head_dim
        in_page = w.index(self.page_size // self.chunk)
        at = w.let(f"arith.divui {number}, {in_page} : index")
        page_i64 = w.let(f"tensor.extract %pages[{at}] : tensor<?xi64>")
        page = w.let(f"arith.index_cast {page_i64} : i64 to index")
        inside = w.times(w.let(f"arith.remui {number}, {in_page} : index"), size)
        start = w.let(f"arith.addi %head_start, {inside} : index")
        return [
            w.let(
                f"{LOAD} {cache}, offsets = [{page}, {start}], sizes = [1, {size}], "
                f"strides = [1, 1] : {READ}{self.cache}>{{%pool}} -> {self.tokens}"
            )
            for cache in ("%all_k", "%all_v")
        ]

    def _scores(self, keys: str, buffer: str) -> str:
        """The buffer with scale * q k^T. Eight tokens give the lanes of one vector a head."""
        w, heads, d = self.writer, self.heads, self.head_dim
        at_once = next(count for count in (8, 4, 2, 1) if count * heads <= MAX_SUMS)

        def eight_tokens(token: str, state: list[str]) -> list[str]:
            (scores,) = state
            row = w.times(token, d)
            sums: list[list[str]] = [[] for _ in range(heads)]
            for first in range(0, LANES, at_once):

                def columns(column: str, state: list[str], first: int = first) -> list[str]:
                    at = w.let(f"arith.addi {row}, {column} : index")
                    queries = [
                        w.load("%q", self.queries, w.plus(column, head * d))
                        for head in range(heads)
                    ]
                    for i in range(at_once):
                        key = w.load(keys, self.tokens, w.plus(at, (first + i) * d))
                        for head, query in enumerate(queries):
                            sum_ = head * at_once + i
                            state[sum_] = w.fma(key, query, state[sum_])
                    return state

                count = heads * at_once
                bounds = (w.index(0), w.index(d), w.index(LANES))
                products = w.loop(bounds, ["%zeros"] * count, [VECTOR] * count, columns)
                for head in range(heads):
                    sums[head] += products[head * at_once : (head + 1) * at_once]
            for head in range(heads):
                score = w.binary("mulf", w.sums(sums[head]), "%scale")
                scores = w.store(score, scores, self.scores, w.plus(token, head * self.chunk))
            return [scores]

        bounds = (w.index(0), "%chunk", w.index(LANES))
        return w.loop(bounds, [buffer], [self.scores], eight_tokens)[0]

    def _rescale(
        self, buffer: str, live: str, peaks: list[str]
    ) -> tuple[list[str], list[list[str]]]:
        """The new peaks, and the scores of each head less its peak; -inf for tokens from `live`."""
        w = self.writer
        starts = range(0, self.chunk, LANES)
        end_i32 = w.let(f"arith.index_cast {live} : index to i32")
        end = w.let(f"vector.broadcast {end_i32} : i32 to vector<{LANES}xi32>")
        seen = []
        for start in starts:
            lanes = list(range(start, start + LANES))
            tokens = w.let(f"arith.constant dense<{lanes}> : vector<{LANES}xi32>")
            seen.append(w.let(f"arith.cmpi slt, {tokens}, {end} : vector<{LANES}xi32>"))
        highest, exponents = [], []
        for head, peak in enumerate(peaks):
            scores = [
                w.select(
                    flags,
                    w.load(buffer, self.scores, w.index(head * self.chunk + start)),
                    "%unseen",
                )
                for flags, start in zip(seen, starts, strict=True)
            ]
            for score in scores:
                peak = w.maximum(peak, score)
            for rotation in ROTATIONS:
                peak = w.maximum(peak, w.shuffle(peak, peak, rotation))
            highest.append(peak)
            exponents.append([w.binary("subf", score, peak) for score in scores])
        return highest, exponents

    def _mix(
        self, values: str, weights: str, live: str, mixed: list[str], factors: list[str]
    ) -> list[str]:
        """mixed * factors + weights * values, for as many columns at once as registers hold."""
        w, heads = self.writer, self.heads
        at_once = largest_divisor(self.vectors, MAX_SUMS // heads)
        mixed = list(mixed)
        for first in range(0, self.vectors, at_once):
            columns = range(first, first + at_once)
            places = [head * self.vectors + column for head in range(heads) for column in columns]

            def token(number: str, state: list[str], columns: range = columns) -> list[str]:
                splats = [
                    w.load_splat(weights, self.scores, w.plus(number, head * self.chunk))
                    for head in range(heads)
                ]
                row = w.times(number, self.head_dim)
                for i, column in enumerate(columns):
                    value = w.load(values, self.tokens, w.plus(row, column * LANES))
                    for head, factor in enumerate(splats):
                        sum_ = head * len(columns) + i
                        state[sum_] = w.fma(factor, value, state[sum_])
                return state

            bounds = (w.index(0), live, w.index(1))
            kept = [w.binary("mulf", mixed[at], factors[at // self.vectors]) for at in places]
            sums = w.loop(bounds, kept, [VECTOR] * len(places), token)
            for at, sum_ in zip(places, sums, strict=True):
                mixed[at] = sum_
        return mixed
