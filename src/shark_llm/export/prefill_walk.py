"""The vector code of a workgroup of prefill attention: see `prefill_attention.py`.

Everything is laid out with the queries side by side, so that both products multiply a vector of
queries with one element of a key or a value, and the softmax needs no sum across lanes. What is
held between steps lies in one buffer in memory.

Legend: L page size, D head_dim, R queries of a workgroup: Q tokens times G heads, C keys of a
chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shark_llm.export.tiling import largest_divisor
from shark_llm.export.vector_writer import (
    LANES,
    LOAD,
    READ,
    VECTOR,
    VectorWriter,
)

MAX_VECTORS = 3
"""Vectors of queries in a tile of a product: with the sums of `COLUMNS` keys or columns they fill
15 of the 16 registers of AVX2."""
COLUMNS = 4
MAX_CHUNK = 64
MAX_QUERIES = 64
MAX_ELEMENTS = 4096
"""At most of D * R and of C * D, for heads of up to 256 columns; wider ones exceed the first."""
MAX_HEAD_DIM = 512
STACK_BYTES = 1 << 17
"""What the compiler must allow a workgroup for its buffer: it takes up to 97 KiB at `MAX_HEAD_DIM`,
and the compiler knows powers of two alone. It is also what the threads of the runtime have
(`task_worker_stack_size`)."""


@dataclass(frozen=True, kw_only=True)
class PrefillWalk:
    """Writes what one workgroup does."""

    dtype: str
    page_size: int
    head_dim: int
    num_kv_heads: int
    tokens: int
    """Q."""
    heads: int
    """G."""
    writer: VectorWriter = field(default_factory=VectorWriter)

    @property
    def queries(self) -> int:
        """R. Query r is of token r % Q and head r // Q."""
        return self.tokens * self.heads

    @property
    def chunk(self) -> int:
        """C, some pages or a part of one."""
        return 1 << (min(MAX_CHUNK, MAX_ELEMENTS // self.head_dim).bit_length() - 1)

    @property
    def piece(self) -> int:
        """Tokens of a chunk that lie side by side."""
        return min(self.page_size, self.chunk)

    @property
    def vectors(self) -> int:
        """Of queries in a tile of a product."""
        return largest_divisor(self.queries // LANES, MAX_VECTORS)

    # The places of a workgroup's buffer: queries (D, R), keys and values (C, D), scores (C, R),
    # mixed (D, R), then the R peaks, totals and factors.

    @property
    def at_keys(self) -> int:
        return self.head_dim * self.queries

    @property
    def at_values(self) -> int:
        return self.at_keys + self.chunk * self.head_dim

    @property
    def at_scores(self) -> int:
        return self.at_values + self.chunk * self.head_dim

    @property
    def at_mixed(self) -> int:
        return self.at_scores + self.chunk * self.queries

    @property
    def at_peaks(self) -> int:
        return self.at_mixed + self.head_dim * self.queries

    @property
    def at_totals(self) -> int:
        return self.at_peaks + self.queries

    @property
    def at_factors(self) -> int:
        return self.at_totals + self.queries

    @property
    def buffer(self) -> str:
        """The type of the workgroup's buffer."""
        return f"tensor<{self.at_factors + self.queries}xf32>"

    @property
    def cache(self) -> str:
        row = self.num_kv_heads * self.page_size * self.head_dim
        return f"tensor<?x{row}x{self.dtype}>"

    @property
    def stored(self) -> str:
        """The type of a piece of keys or values, flat."""
        return f"tensor<{self.piece * self.head_dim}x{self.dtype}>"

    @property
    def tile(self) -> str:
        """The type of the workgroup's queries as they come, and of its result: (Q, G*D)."""
        return f"tensor<{self.tokens}x{self.heads * self.head_dim}xf32>"

    def result(self) -> str:
        """All chunks in turn; returns the workgroup's result. To be written once."""
        w = self.writer
        buffer = self._start(w.let(f"tensor.empty() : {self.buffer}"))
        bounds = (w.index(0), "%chunks", w.index(1))

        def chunk(number: str, state: list[str]) -> list[str]:
            first = w.times(number, self.chunk)
            left = w.let(f"arith.subi %length, {first} : index")
            live = w.let(f"arith.minui {left}, %chunk : index")
            buffer = self._widen(first, live, state[0])
            buffer = self._scores(live, buffer)
            buffer = self._rescale(first, live, buffer)
            return [self._mix(live, buffer)]

        (buffer,) = w.loop(bounds, [buffer], [self.buffer], chunk)
        return self._end(buffer)

    def _start(self, buffer: str) -> str:
        """Scaled queries turned to (D, R); nothing mixed; peaks at the lowest, totals at 0."""
        w = self.writer

        def columns(column: str, state: list[str]) -> list[str]:
            (buffer,) = state
            for block in range(self.queries // LANES):
                head, token = divmod(block * LANES, self.tokens)
                at = w.plus(column, head * self.head_dim)
                rows = [
                    w.binary(
                        "mulf", w.load("%q", self.tile, f"{w.index(token + i)}, {at}"), "%scale"
                    )
                    for i in range(LANES)
                ]
                for i, turned in enumerate(w.transposed(rows)):
                    place = w.plus(w.times(w.plus(column, i), self.queries), block * LANES)
                    buffer = w.store(turned, buffer, self.buffer, place)
            return [buffer]

        bounds = (w.index(0), w.index(self.head_dim), w.index(LANES))
        (buffer,) = w.loop(bounds, [buffer], [self.buffer], columns)
        buffer = self._fill(buffer, "%zeros", self.at_mixed, self.at_peaks)
        buffer = self._fill(buffer, "%lowest", self.at_peaks, self.at_totals)
        return self._fill(buffer, "%zeros", self.at_totals, self.at_factors)

    def _fill(self, buffer: str, value: str, first: int, end: int) -> str:
        w = self.writer
        bounds = (w.index(first), w.index(end), w.index(LANES))

        def store(at: str, state: list[str]) -> list[str]:
            return [w.store(value, state[0], self.buffer, at)]

        return w.loop(bounds, [buffer], [self.buffer], store)[0]

    def _widen(self, first: str, live: str, buffer: str) -> str:
        """Copy the pieces of the chunk that begins at token `first` as f32."""
        w, size = self.writer, self.piece * self.head_dim
        pieces = w.let(f"arith.ceildivui {live}, {w.index(self.piece)} : index")

        def piece(number: str, state: list[str]) -> list[str]:
            token = w.let(f"arith.addi {first}, {w.times(number, self.piece)} : index")
            at = w.let(f"arith.divui {token}, %page_size : index")
            page_i64 = w.let(f"tensor.extract %pages[{at}] : tensor<?xi64>")
            page = w.let(f"arith.index_cast {page_i64} : i64 to index")
            inside = w.times(w.let(f"arith.remui {token}, %page_size : index"), self.head_dim)
            start = w.let(f"arith.addi %head_start, {inside} : index")
            target = w.times(number, size)
            stored = [
                w.let(
                    f"{LOAD} {cache}, offsets = [{page}, {start}], sizes = [1, {size}], "
                    f"strides = [1, 1] : {READ}{self.cache}>{{%pool}} -> {self.stored}"
                )
                for cache in ("%all_k", "%all_v")
            ]

            def copy(at: str, state: list[str]) -> list[str]:
                (buffer,) = state
                to = w.let(f"arith.addi {target}, {at} : index")
                for tokens, begin in zip(stored, (self.at_keys, self.at_values), strict=True):
                    value = w.load(tokens, self.stored, at)
                    buffer = w.store(value, buffer, self.buffer, w.plus(to, begin))
                return [buffer]

            return w.loop((w.index(0), w.index(size), w.index(LANES)), state, [self.buffer], copy)

        return w.loop((w.index(0), pieces, w.index(1)), [buffer], [self.buffer], piece)[0]

    def _scores(self, live: str, buffer: str) -> str:
        """The buffer with k q^T of the first `live` keys, and up to `COLUMNS` - 1 more."""
        w, d, r = self.writer, self.head_dim, self.queries

        def tile(query: str, state: list[str]) -> list[str]:
            def keys(key: str, state: list[str]) -> list[str]:
                (buffer,) = state
                row = w.times(key, d)

                def columns(column: str, sums: list[str]) -> list[str]:
                    at = w.let(f"arith.addi {w.times(column, r)}, {query} : index")
                    queries = self._queries(buffer, at)
                    element = w.let(f"arith.addi {row}, {column} : index")
                    for j in range(COLUMNS):
                        place = w.plus(element, self.at_keys + j * d)
                        splat = w.load_splat(buffer, self.buffer, place)
                        for i, vector in enumerate(queries):
                            sum_ = j * self.vectors + i
                            sums[sum_] = w.fma(splat, vector, sums[sum_])
                    return sums

                count = COLUMNS * self.vectors
                bounds = (w.index(0), w.index(d), w.index(1))
                sums = w.loop(bounds, ["%zeros"] * count, [VECTOR] * count, columns)
                to = w.let(f"arith.addi {w.times(key, r)}, {query} : index")
                for at, sum_ in enumerate(sums):
                    j, i = divmod(at, self.vectors)
                    place = w.plus(to, self.at_scores + j * r + i * LANES)
                    buffer = w.store(sum_, buffer, self.buffer, place)
                return [buffer]

            bounds = (w.index(0), live, w.index(COLUMNS))
            return w.loop(bounds, state, [self.buffer], keys)

        return self._by_tile(buffer, tile)

    def _rescale(self, first: str, live: str, buffer: str) -> str:
        """Scores turned to weights, and new peaks, totals and factors."""
        w, r = self.writer, self.queries
        wide, narrow = f"vector<{LANES}xi64>", f"vector<{LANES}xi32>"
        before = w.let(f"arith.index_cast {first} : index to i32")

        def eight_queries(query: str, state: list[str]) -> list[str]:
            (buffer,) = state
            token = w.let(f"arith.remui {query}, %tokens_here : index")
            seen_i64 = w.let(
                f"vector.transfer_read %seen[{token}], %no_token {{in_bounds = [true]}} : "
                f"tensor<{self.tokens}xi64>, {wide}"
            )
            seen = w.let(f"arith.trunci {seen_i64} : {wide} to {narrow}")
            scores = w.plus(query, self.at_scores)

            def masked(key: str, buffer: str) -> tuple[str, str]:
                key_i32 = w.let(f"arith.index_cast {key} : index to i32")
                key_i32 = w.let(f"arith.addi {key_i32}, {before} : i32")
                splat = w.let(f"vector.broadcast {key_i32} : i32 to {narrow}")
                flags = w.let(f"arith.cmpi slt, {splat}, {seen} : {narrow}")
                at = w.let(f"arith.addi {scores}, {w.times(key, r)} : index")
                return at, w.select(flags, w.load(buffer, self.buffer, at), "%unseen")

            def highest(key: str, state: list[str]) -> list[str]:
                _, score = masked(key, buffer)
                return [w.maximum(state[0], score)]

            bounds = (w.index(0), live, w.index(1))
            peak = w.load(buffer, self.buffer, w.plus(query, self.at_peaks))
            (higher,) = w.loop(bounds, [peak], [VECTOR], highest)

            def weigh(key: str, state: list[str]) -> list[str]:
                total, buffer = state
                at, score = masked(key, buffer)
                weight = w.exp(w.binary("subf", score, higher))
                total = w.binary("addf", total, weight)
                return [total, w.store(weight, buffer, self.buffer, at)]

            factor = w.exp(w.binary("subf", peak, higher))
            total = w.load(buffer, self.buffer, w.plus(query, self.at_totals))
            total = w.binary("mulf", total, factor)
            total, buffer = w.loop(bounds, [total, buffer], [VECTOR, self.buffer], weigh)
            for value, begin in (
                (higher, self.at_peaks),
                (total, self.at_totals),
                (factor, self.at_factors),
            ):
                buffer = w.store(value, buffer, self.buffer, w.plus(query, begin))
            return [buffer]

        bounds = (w.index(0), w.index(r), w.index(LANES))
        return w.loop(bounds, [buffer], [self.buffer], eight_queries)[0]

    def _mix(self, live: str, buffer: str) -> str:
        """The buffer with mixed * factors + v^T weights."""
        w, d, r = self.writer, self.head_dim, self.queries

        def tile(query: str, state: list[str]) -> list[str]:
            factors = self._queries(state[0], w.plus(query, self.at_factors))

            def columns(column: str, state: list[str]) -> list[str]:
                (buffer,) = state
                start = w.let(f"arith.addi {w.times(column, r)}, {query} : index")
                places = [
                    w.plus(start, self.at_mixed + j * r + i * LANES)
                    for j in range(COLUMNS)
                    for i in range(self.vectors)
                ]
                held = [
                    w.binary("mulf", w.load(buffer, self.buffer, p), factors[at % self.vectors])
                    for at, p in enumerate(places)
                ]

                def keys(key: str, sums: list[str]) -> list[str]:
                    at = w.let(f"arith.addi {w.times(key, r)}, {query} : index")
                    weights = self._queries(buffer, w.plus(at, self.at_scores))
                    element = w.let(f"arith.addi {w.times(key, d)}, {column} : index")
                    for j in range(COLUMNS):
                        place = w.plus(element, self.at_values + j)
                        splat = w.load_splat(buffer, self.buffer, place)
                        for i, vector in enumerate(weights):
                            sum_ = j * self.vectors + i
                            sums[sum_] = w.fma(splat, vector, sums[sum_])
                    return sums

                bounds = (w.index(0), live, w.index(1))
                sums = w.loop(bounds, held, [VECTOR] * len(held), keys)
                for place, sum_ in zip(places, sums, strict=True):
                    buffer = w.store(sum_, buffer, self.buffer, place)
                return [buffer]

            bounds = (w.index(0), w.index(d), w.index(COLUMNS))
            return w.loop(bounds, state, [self.buffer], columns)

        return self._by_tile(buffer, tile)

    def _end(self, buffer: str) -> str:
        """(mixed / total)^T."""
        w = self.writer
        result = w.let(f"tensor.empty() : {self.tile}")

        def columns(column: str, state: list[str]) -> list[str]:
            (result,) = state
            for block in range(self.queries // LANES):
                head, token = divmod(block * LANES, self.tokens)
                total = w.load(buffer, self.buffer, w.index(self.at_totals + block * LANES))
                mixed = []
                for i in range(LANES):
                    row = w.times(w.plus(column, i), self.queries)
                    value = w.load(buffer, self.buffer, w.plus(row, self.at_mixed + block * LANES))
                    mixed.append(w.binary("divf", value, total))
                at = w.plus(column, head * self.head_dim)
                for i, turned in enumerate(w.transposed(mixed)):
                    place = f"{w.index(token + i)}, {at}"
                    result = w.store(turned, result, self.tile, place)
            return [result]

        bounds = (w.index(0), w.index(self.head_dim), w.index(LANES))
        return w.loop(bounds, [result], [self.tile], columns)[0]

    def _queries(self, buffer: str, at: str) -> list[str]:
        """A tile's vectors of what there is for each query."""
        w = self.writer
        return [w.load(buffer, self.buffer, w.plus(at, i * LANES)) for i in range(self.vectors)]

    def _by_tile(self, buffer: str, body: Callable[[str, list[str]], list[str]]) -> str:
        """body(first query, [buffer]) for each tile of queries."""
        w = self.writer
        bounds = (w.index(0), w.index(self.queries), w.index(self.vectors * LANES))
        return w.loop(bounds, [buffer], [self.buffer], body)[0]
