"""Products of whole numbers as vector code, for int8 weights on CPUs with AVX2.

Widening a weight of 8 bits to f32 takes longer than its multiplication. So rows are rounded to 8
bits too, by groups of columns (`llama.round_rows`), and

    y[m, n] = scale[n] * sum over groups g of step[m, g] * (sum over k in g of q[m, k] * w[n, k])

where the inner sum is exact: one instruction multiplies 16 pairs of 16 bits and adds them by two to
32. Whole numbers of a row lie in pairs, so that one load brings a pair to all lanes, and those of a
panel likewise: (P, K/2, 16, 2).

Rounded rows are one tensor (M, K/2 + K/G) i32: the pairs of a row, then the bits of its steps.

Legend: as in `row_products.py`; G columns of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shark_llm.export.kernel import Operand, kernel
from shark_llm.export.row_products import (
    MAX_ROWS,
    PANEL,
    VECTORS,
    RowProduct,
)
from shark_llm.export.tiling import largest_divisor
from shark_llm.export.vector_writer import (
    LANES,
    LOAD,
    PAIRS,
    READ,
    ROTATIONS,
    STORE,
    VECTOR,
    WHOLE,
    WRITE,
    VectorWriter,
)
from shark_llm.model.llama import LARGEST_ROUNDED, LEAST_PEAK, rounding_group

STEP = 4
"""Pairs of a turn of the inner loop: a divisor of those of any group."""
MULTIPLY = "llvm.x86.avx2.pmadd.wd"
"""Of 16 products of 16 bits, neighbours added: vpmaddwd."""


def rounded_rows(m: int | None, k: int) -> str:
    """The type of `m` rows (None: any number) of `k` columns that are rounded."""
    group = rounding_group(k)
    assert group is not None
    return f"tensor<{'?' if m is None else m}x{k // 2 + k // group}xi32>"


def whole_product_function(name: str, m: int | None, k: int, n: int) -> str:
    """A private function (x rounded, w (P, K*16) i8, scales (P*16) f32) -> (M, P*16) f32.

    `m` rows, or any number of at least 6 (None).
    """
    product = WholeProduct(m=m, k=k, panels=-(-n // PANEL), dtype="i8", scaled=True)
    return product.text(name)


def rounding_function(name: str, m: int | None, k: int) -> str:
    """A private function x (M, K) f32 -> its rows rounded. A row that is not finite has steps that
    are not either."""
    group = rounding_group(k)
    assert group is not None
    rows = "?" if m is None else str(m)
    pairs, groups = k // 2, k // group
    x, y = f"tensor<{rows}x{k}xf32>", rounded_rows(m, k)
    here, dims_here, dims = (("%m_here",), "{%m_here}", "{%m}") if m is None else ((), "", "")
    result = f"tensor<1x{pairs + groups}xi32>"
    writer = VectorWriter()
    rounded = _round_row(writer, k, group, result)
    work = f"""
{writer.declared}
    %zero = arith.constant 0.0 : f32
    %zeros = arith.constant dense<0.0> : {VECTOR}
    %largest = arith.constant dense<{float(LARGEST_ROUNDED)}> : {VECTOR}
    %least_peak = arith.constant dense<{LEAST_PEAK:.1e}> : {VECTOR}
    %least = arith.constant dense<{-float(LARGEST_ROUNDED)}> : {VECTOR}
    %row = flow.dispatch.workgroup.id[0] : index
    %x = {LOAD} %all_x, offsets = [%row, 0], sizes = [1, {k}], strides = [1, 1]
        : {READ}{x}>{dims_here} -> tensor<1x{k}xf32>
{writer.text}
    {STORE} {rounded}, %all_y, offsets = [%row, 0], sizes = [1, {pairs + groups}],
        strides = [1, 1] : {result} -> {WRITE}{y}>{dims_here}"""
    executable = kernel(
        f"{name}.kernel",
        inputs=[Operand(name="%all_x", tensor=x, dims=here)],
        sizes=("%m_here",),
        output=Operand(name="%all_y", tensor=y, dims=here),
        grid=1,
        lines=work,
    )
    return f"""
{executable}
func.func private @{name}(%x: {x}) -> {y} {{
  %axis0 = arith.constant 0 : index
  %m = tensor.dim %x, %axis0 : {x}
  %y = flow.dispatch @{name}.kernel::@{name}.kernel[%m](%x, %m) : ({x}{dims}, index) -> {y}{dims}
  return %y : {y}
}}"""


def _round_row(w: VectorWriter, k: int, group: int, result: str) -> str:
    """The pairs of a row, then the bits of the step of each group."""
    row, zero = f"tensor<1x{k}xf32>", w.index(0)
    empty = w.let(f"tensor.empty() : {result}")

    def one_group(number: str, state: list[str]) -> list[str]:
        (block,) = state
        start = w.times(number, group)
        values = [w.load("%x", row, f"{zero}, {w.plus(start, i)}") for i in range(0, group, LANES)]
        peak = w.let(f"math.absf {values[0]} : {VECTOR}")
        for value in values[1:]:
            # NaN stays, where one instruction for a maximum would drop it.
            peak = w.binary("maximumf", peak, w.let(f"math.absf {value} : {VECTOR}"))
        for lanes in ROTATIONS:
            peak = w.binary("maximumf", peak, w.shuffle(peak, peak, lanes))
        step = w.binary("divf", peak, "%largest")
        is_zero = w.let(f"arith.cmpf olt, {peak}, %least_peak : {VECTOR}")
        inverse = w.select(is_zero, "%zeros", w.binary("divf", "%largest", peak))
        whole = [_rounded(w, w.binary("mulf", value, inverse)) for value in values]
        pairs_start = w.times(number, group // 2)
        for i in range(0, len(whole), 2):
            joined = w.let(
                f"vector.shuffle {whole[i]}, {whole[i + 1]} {list(range(2 * LANES))} : "
                f"vector<{LANES}xi16>, vector<{LANES}xi16>"
            )
            pairs = w.let(f"vector.bitcast {joined} : {PAIRS} to {WHOLE}")
            at = f"{zero}, {w.plus(pairs_start, i * LANES // 2)}"
            block = w.let(
                f"vector.transfer_write {pairs}, {block}[{at}] {{in_bounds = [true]}} : "
                f"{WHOLE}, {result}"
            )
        first = w.let(f"vector.extract {step}[0] : f32 from {VECTOR}")
        bits = w.let(f"arith.bitcast {first} : f32 to i32")
        at = f"{zero}, {w.plus(number, k // 2)}"
        return [w.let(f"tensor.insert {bits} into {block}[{at}] : {result}")]

    bounds = (zero, w.index(k // group), w.index(1))
    return w.loop(bounds, [empty], [result], one_group)[0]


def _rounded(w: VectorWriter, values: str) -> str:
    """8 values as i16, rounded half to even. One that is NaN becomes some number."""
    near = w.let(f"math.roundeven {values} : {VECTOR}")
    near = w.maximum(near, "%least")
    above = w.let(f"arith.cmpf ogt, {near}, %largest : {VECTOR}")
    near = w.select(above, "%largest", near)
    whole = w.let(f"arith.fptosi {near} : {VECTOR} to {WHOLE}")
    return w.let(f"arith.trunci {whole} : {WHOLE} to vector<{LANES}xi16>")


@dataclass(frozen=True, kw_only=True)
class WholeProduct(RowProduct):
    """A product of rounded rows."""

    @property
    def group(self) -> int:
        group = rounding_group(self.k)
        assert group is not None
        return group

    @property
    def row(self) -> str:
        return f"{self.k // 2 + self.k // self.group}xi32"

    @property
    def panels_at_once(self) -> int:
        """As many as the registers hold sums of: a core waits less for six streams of a weight than
        for one."""
        if self.m is None or self.m > MAX_ROWS // 2:
            return 1
        return largest_divisor(self.panels, MAX_ROWS // self.m)

    def _tile(self, places: Sequence[tuple[str, str]], rows: list[str], block: str) -> str:
        w = self.writer
        bases = [w.times(panel, self.k * PANEL) for panel, _ in places]
        pairs = self.group // 2
        read = [w.let(f"arith.addi %first_row, {row} : index") for row in rows]
        width = len(places) * VECTORS
        count = len(rows) * width
        nothing = w.let(f"arith.constant dense<0> : {WHOLE}")

        def group(number: str, totals: list[str]) -> list[str]:
            first_pair = w.times(number, pairs)
            before = w.times(number, self.group * PANEL)
            starts = [w.let(f"arith.addi {base}, {before} : index") for base in bases]

            def columns(first: str, sums: list[str]) -> list[str]:
                behind = w.times(first, 2 * PANEL)
                here = [w.let(f"arith.addi {start}, {behind} : index") for start in starts]
                pair = w.let(f"arith.addi {first_pair}, {first} : index")
                for i in range(STEP):
                    at = w.plus(pair, i)
                    offsets = [i * 2 * PANEL + j * 2 * LANES for j in range(VECTORS)]
                    spots = [(h, offset) for h in here for offset in offsets]
                    self._multiply(sums, [(row, at) for row in read], spots)
                return sums

            bounds = (w.index(0), w.index(pairs), w.index(STEP))
            sums = w.loop(bounds, [nothing] * count, [WHOLE] * count, columns)
            at = w.plus(number, self.k // 2)
            steps = [self._step(row, at) for row in read]
            return [
                w.fma(
                    w.let(f"arith.sitofp {sum_} : {WHOLE} to {VECTOR}"),
                    steps[i // width],
                    total,
                )
                for i, (sum_, total) in enumerate(zip(sums, totals, strict=True))
            ]

        bounds = (w.index(0), w.index(self.k // self.group), w.index(1))
        totals = w.loop(bounds, ["%zeros"] * count, [VECTOR] * count, group)
        for i, (panel, column) in enumerate(places):
            first = i * VECTORS
            of_panel = [
                total
                for row in range(len(rows))
                for total in totals[row * width :][first : first + VECTORS]
            ]
            block = self._stored(panel, column, rows, of_panel, block)
        return block

    def _multiply(
        self, sums: list[str], pairs: list[tuple[str, str]], spots: list[tuple[str, int]]
    ) -> None:
        """Add a pair of each row times each vector of weights. The fewer of the two are loaded
        first and stay in registers, of which the sums leave four."""
        w = self.writer
        if len(pairs) < len(spots):
            held = [self._pair(*pair) for pair in pairs]
            for v, (start, offset) in enumerate(spots):
                weight = self._weights(w.plus(start, offset))
                for r, x in enumerate(held):
                    sums[r * len(spots) + v] = self._added(sums[r * len(spots) + v], x, weight)
            return
        weights = [self._weights(w.plus(start, offset)) for start, offset in spots]
        for r, pair in enumerate(pairs):
            x = self._pair(*pair)
            for v, weight in enumerate(weights):
                sums[r * len(spots) + v] = self._added(sums[r * len(spots) + v], x, weight)

    def _pair(self, row: str, at: str) -> str:
        """One pair of a row in all lanes."""
        w = self.writer
        pair = w.let(f"tensor.extract %rows[{row}, {at}] : {self.x}")
        everywhere = w.let(f"vector.broadcast {pair} : i32 to {WHOLE}")
        return w.let(f"vector.bitcast {everywhere} : {WHOLE} to {PAIRS}")

    def _step(self, row: str, at: str) -> str:
        """The step of a group of a row in all lanes."""
        w = self.writer
        bits = w.let(f"tensor.extract %rows[{row}, {at}] : {self.x}")
        step = w.let(f"arith.bitcast {bits} : i32 to f32")
        return w.let(f"vector.broadcast {step} : f32 to {VECTOR}")

    def _weights(self, at: str) -> str:
        """The pairs of 8 rows of the weight, as 16 bits each."""
        w, narrow = self.writer, f"vector<{2 * LANES}xi8>"
        read = w.let(
            f"vector.transfer_read %weight[{at}], %narrow_zero {{in_bounds = [true]}} : "
            f"{self.weight}, {narrow}"
        )
        return w.let(f"arith.extsi {read} : {narrow} to {PAIRS}")

    def _added(self, sum_: str, x: str, weight: str) -> str:
        w = self.writer
        products = w.let(
            f'llvm.call_intrinsic "{MULTIPLY}"({x}, {weight}) : ({PAIRS}, {PAIRS}) -> {WHOLE}'
        )
        return w.let(f"arith.addi {sum_}, {products} : {WHOLE}")
