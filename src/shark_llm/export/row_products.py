"""Products of several rows with packed weights as vector code, for CPUs with AVX2.

The compiler's product of packed operands wants the rows in tiles too, and gives its result in
tiles: both are passes of their own, tiles are padded to full height, and what follows has to take
them apart. Here rows are read and written where they lie. A workgroup walks
its panels of the weight, and for each takes the rows in tiles of up to 6:

    y[rows, panel] = sum over k of x[rows, k] * w[panel, k, :]

6 x 16 sums fill 12 of the 16 registers of AVX2. Of a fixed number of rows, tiles differ by one row
at most; of an unknown number the last tile begins early enough to be full, and computes some rows
again.

Legend: M rows, K columns, N rows of the weight, P panels of `PANEL` of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from shark_llm.artifacts.irpa import DTYPE_BYTES
from shark_llm.export.kernel import Operand, kernel
from shark_llm.export.vector_writer import (
    LANES,
    LOAD,
    READ,
    STORE,
    VECTOR,
    WRITE,
    VectorWriter,
)

PANEL = 16
VECTORS = PANEL // LANES
MAX_ROWS = 6
MAX_FEW = 32
"""Up to so many rows are few: each panel is read once and all rows pass it, tile by tile, without a
loop. Of more rows, or an unknown number, each tile passes a workgroup's panels."""
ROW_BLOCK = 96
"""Of many rows, about so many are a workgroup's."""
MIN_WORKGROUPS = 8
"""At least so many workgroups for a block of rows, if there are as many panels."""
MAX_WORKGROUPS = 64
"""At most so many for few rows, if the number of panels has a divisor that allows it."""
CACHED_BYTES = 1 << 18
"""Of weight that a workgroup may hold in its core's cache while many rows pass."""
STEP = 2
"""Columns of a turn of the inner loop, if K is a multiple."""


def product_function(name: str, m: int | None, k: int, n: int, dtype: str, *, scaled: bool) -> str:
    """A private function (x (M, K) f32, w (P, K*16), scales (P*16) f32) -> (M, P*16) f32.

    `m` rows, or any number of at least 6 (None). `dtype` is that of w. Scales: only if `scaled`.
    """
    return RowProduct(m=m, k=k, panels=-(-n // PANEL), dtype=dtype, scaled=scaled).text(name)


@dataclass(frozen=True, kw_only=True)
class RowProduct:
    """One product's text. `text`, `_walk` and the properties deal out the work; `_tile` does it."""

    m: int | None
    k: int
    panels: int
    dtype: str
    scaled: bool
    writer: VectorWriter = field(default_factory=VectorWriter)

    @property
    def is_few(self) -> bool:
        return self.m is not None and self.m <= MAX_FEW

    @property
    def grain(self) -> int:
        """Panels of a workgroup."""
        parts = self.panels // self.panels_at_once
        most = max(1, parts // MIN_WORKGROUPS)
        divisors = [g for g in range(1, most + 1) if parts % g == 0]
        if self.is_few:
            few = (g for g in divisors if parts // g <= MAX_WORKGROUPS)
            return self.panels_at_once * next(few, divisors[-1])
        panel_bytes = self.k * PANEL * DTYPE_BYTES[self.dtype]
        return max((g for g in divisors if g * panel_bytes <= CACHED_BYTES), default=1)

    @property
    def panels_at_once(self) -> int:
        """Panels that a tile takes together: a divisor of them all, and more than one only if rows
        are few."""
        return 1

    @property
    def rows(self) -> str:
        return "?" if self.m is None else str(self.m)

    @property
    def row(self) -> str:
        """Elements of a row of x, and their type."""
        return f"{self.k}xf32"

    @property
    def x(self) -> str:
        return f"tensor<{self.rows}x{self.row}>"

    @property
    def weight(self) -> str:
        return f"tensor<{self.panels * self.k * PANEL}x{self.dtype}>"

    @property
    def scales(self) -> str:
        return f"tensor<{self.panels * PANEL}xf32>"

    @property
    def block(self) -> str:
        """The type of a workgroup's result."""
        return f"tensor<{self.m if self.is_few else '?'}x{self.grain * PANEL}xf32>"

    def text(self, name: str) -> str:
        """The whole function."""
        x, w, y = self.x, self.weight, f"tensor<{self.rows}x{self.panels * PANEL}xf32>"
        packed = f"tensor<{self.panels}x{self.k * PANEL}x{self.dtype}>"
        dims, dims_here = ("{%m}", "{%m_here}") if self.m is None else ("", "")
        result = self._walk()
        here = ("%m_here",) if self.m is None else ()
        inputs = [Operand(name="%all_x", tensor=x, dims=here), Operand(name="%all_w", tensor=w)]
        passed, types = "%x, %flat", f"{x}{dims}, {w}"
        scales, load_scales = "", ""
        if self.scaled:
            scales = f", %scales: {self.scales}"
            inputs.append(Operand(name="%all_scales", tensor=self.scales))
            passed, types = f"{passed}, %scales", f"{types}, {self.scales}"
            load_scales = (
                f"    %scales_here = {LOAD} %all_scales, offsets = [0], "
                f"sizes = [{self.panels * PANEL}], strides = [1] : "
                f"{READ}{self.scales}> -> {self.scales}"
            )
        zero = "0 : i8" if self.dtype == "i8" else f"0.0 : {self.dtype}"
        work = f"""
{self.writer.declared}
    %zero = arith.constant 0.0 : f32
    %narrow_zero = arith.constant {zero}
    %zeros = arith.constant dense<0.0> : {VECTOR}
    %group = flow.dispatch.workgroup.id[0] : index
    %grain = arith.constant {self.grain} : index
    %first_panel = arith.muli %group, %grain : index
    %panel_size = arith.constant {PANEL} : index
    %first_column = arith.muli %first_panel, %panel_size : index
    %part = flow.dispatch.workgroup.id[1] : index
    %part_rows = arith.constant {ROW_BLOCK} : index
    %first_row = arith.muli %part, %part_rows : index
    %one = arith.constant 1 : index
    %last_part = arith.subi %parts, %one : index
    %is_last = arith.cmpi eq, %part, %last_part : index
    %next_row = arith.addi %first_row, %part_rows : index
    %end_row = arith.select %is_last, %m_here, %next_row : index
    %rows_here = arith.subi %end_row, %first_row : index
    %max_rows = arith.constant {MAX_ROWS} : index
    %tiles = arith.ceildivui %rows_here, %max_rows : index
    %last_start = arith.subi %rows_here, %max_rows : index
    %rows = {LOAD} %all_x, offsets = [0, 0],
        sizes = [{self.m or "%m_here"}, {self.row.partition("x")[0]}], strides = [1, 1]
        : {READ}{x}>{dims_here} -> {x}
    %weight = {LOAD} %all_w, offsets = [0], sizes = [{self.panels * self.k * PANEL}], strides = [1]
        : {READ}{w}> -> {w}
{load_scales}
{self.writer.text}
    {STORE} {result}, %all_y, offsets = [%first_row, %first_column],
        sizes = [{self.m if self.is_few else "%rows_here"}, {self.grain * PANEL}], strides = [1, 1]
        : {self.block} -> {WRITE}{y}>{dims_here}"""
        executable = kernel(
            f"{name}.kernel",
            inputs=inputs,
            sizes=("%m_here", "%parts"),
            output=Operand(name="%all_y", tensor=y, dims=here),
            grid=2,
            lines=work,
        )
        return f"""
{executable}
func.func private @{name}(%x: {x}, %packed: {packed}{scales}) -> {y} {{
  %axis0 = arith.constant 0 : index
  %flat = tensor.collapse_shape %packed [[0, 1]] : {packed} into {w}
  %m = tensor.dim %x, %axis0 : {x}
  %groups = arith.constant {self.panels // self.grain} : index
  %part_rows = arith.constant {ROW_BLOCK} : index
  %one = arith.constant 1 : index
  %whole_parts = arith.divui %m, %part_rows : index
  %parts = arith.maxui %whole_parts, %one : index
  %y = flow.dispatch @{name}.kernel::@{name}.kernel[%groups, %parts]({passed}, %m, %parts)
      : ({types}, index, index) -> {y}{dims}
  return %y : {y}
}}"""

    def _walk(self) -> str:
        """All tiles of a workgroup in turn; returns its block of the result."""
        w = self.writer
        empty = w.let(f"tensor.empty({'' if self.is_few else '%rows_here'}) : {self.block}")
        together = self.panels_at_once
        panels = (w.index(0), w.index(self.grain), w.index(together))

        def panel(number: str, state: list[str], parts: list[list[str]]) -> list[str]:
            places = [
                (w.let(f"arith.addi %first_panel, {here} : index"), w.times(here, PANEL))
                for here in (w.plus(number, i) for i in range(together))
            ]
            (block,) = state
            for rows in parts:
                block = self._tile(places, rows, block)
            return [block]

        if self.m is not None and self.is_few:
            starts = itertools.accumulate(_even_parts(self.m, MAX_ROWS), initial=0)
            parts = [[w.index(row) for row in range(*ends)] for ends in itertools.pairwise(starts)]
            few = functools.partial(panel, parts=parts)
            return w.loop(panels, [empty], [self.block], few)[0]

        def tile(number: str, state: list[str]) -> list[str]:
            start = w.let(f"arith.minui {w.times(number, MAX_ROWS)}, %last_start : index")
            rows = [w.plus(start, i) for i in range(MAX_ROWS)]
            many = functools.partial(panel, parts=[rows])
            return w.loop(panels, state, [self.block], many)

        return w.loop((w.index(0), "%tiles", w.index(1)), [empty], [self.block], tile)[0]

    def _tile(self, places: Sequence[tuple[str, str]], rows: list[str], block: str) -> str:
        """The block with the results of some panels. `places`: each panel's number and its first
        column in the block; `rows` are counted from the workgroup's first."""
        w = self.writer
        ((panel, column),) = places
        base = w.times(panel, self.k * PANEL)
        step = STEP if self.k % STEP == 0 else 1
        read = [w.let(f"arith.addi %first_row, {row} : index") for row in rows]

        def columns(first: str, sums: list[str]) -> list[str]:
            start = w.let(f"arith.addi {base}, {w.times(first, PANEL)} : index")
            for i in range(step):
                k = w.plus(first, i)
                at = [w.plus(start, i * PANEL + j * LANES) for j in range(VECTORS)]
                weights = [w.load("%weight", self.weight, place) for place in at]
                for r, row in enumerate(read):
                    x = w.load_splat("%rows", self.x, f"{row}, {k}")
                    for j, weight in enumerate(weights):
                        sum_ = r * VECTORS + j
                        sums[sum_] = w.fma(x, weight, sums[sum_])
            return sums

        count = len(rows) * VECTORS
        bounds = (w.index(0), w.index(self.k), w.index(step))
        sums = w.loop(bounds, ["%zeros"] * count, [VECTOR] * count, columns)
        return self._stored(panel, column, rows, sums, block)

    def _stored(self, panel: str, column: str, rows: list[str], sums: list[str], block: str) -> str:
        """The block with the sums of `rows`, a panel's vectors of each row in turn, scaled."""
        w = self.writer
        if self.scaled:
            start = w.times(panel, PANEL)
            scales = [
                w.load("%scales_here", self.scales, w.plus(start, j * LANES))
                for j in range(VECTORS)
            ]
            sums = [w.binary("mulf", s, scales[i % VECTORS]) for i, s in enumerate(sums)]
        for i, sum_ in enumerate(sums):
            r, j = divmod(i, VECTORS)
            block = w.store(sum_, block, self.block, f"{rows[r]}, {w.plus(column, j * LANES)}")
        return block


def _even_parts(number: int, most: int) -> list[int]:
    """`number` in as few parts of at most `most` as there can be, which differ by one at most."""
    count = -(-number // most)
    return [number // count + (i < number % count) for i in range(count)]
