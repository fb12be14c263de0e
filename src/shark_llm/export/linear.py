"""Matrix products with weights, written for the target: x (M, K) f32, weight (N, K) -> (M, N) f32.

Two forms, chosen per target:

    packed   The weight is packed into tiles of `tile_n` rows, once, when the module loads (the packing
             is a constant expression); activations stay f32 and the weight is widened in registers.
             For CPUs without bf16 arithmetic: the generic product of two bf16 operands is scalar code
             there, and the compiler's own tiling swaps operands when M is dynamic, so that the
             narrow weight is widened once for every row instead of once for all.
    plain    A matmul of two operands of the weight's dtype with f32 accumulation: what GPUs have
             instructions for, and what the compiler's data tiling packs itself on CPUs with bf16
             arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LinearForm:
    """How products with weights are written. Tiles are read by the packed form only."""

    form: Literal["packed", "plain"]
    tile_n: int = 16
    max_tile_m: int = 8
    prefill_tile_m: int = 4


@dataclass
class LinearLibrary:
    """The product functions that a module needs, each written once."""

    form: LinearForm
    dtype: str
    functions: dict[str, str] = field(default_factory=dict)

    def function(self, m: int | None, k: int, n: int, *, bias: bool) -> str:
        """The symbol of a product with `m` rows (None: dynamic), written on first use."""
        rows = "?" if m is None else str(m)
        name = f"linear.{'dyn' if m is None else m}x{k}x{n}{'.bias' if bias else ''}"
        if name not in self.functions:
            lines = self._packed(m, k, n) if self.form.form == "packed" else self._plain(rows, k, n)
            bias_argument = f", %bias: tensor<{n}x{self.dtype}>" if bias else ""
            if bias:
                lines += self._add_bias(rows, n)
            result = "%sum" if bias else "%y"
            self.functions[name] = "\n".join(
                [
                    f"  func.func private @{name}(%x: tensor<{rows}x{k}xf32>, "
                    f"%w: tensor<{n}x{k}x{self.dtype}>{bias_argument}) -> tensor<{rows}x{n}xf32> {{",
                    "    %c0 = arith.constant 0 : index",
                    "    %zero = arith.constant 0.0 : f32",
                    f"    %rows = tensor.dim %x, %c0 : tensor<{rows}x{k}xf32>",
                    *(f"    {line}" for line in lines),
                    f"    return {result} : tensor<{rows}x{n}xf32>",
                    "  }",
                ]
            )
        return name

    def _packed(self, m: int | None, k: int, n: int) -> list[str]:
        tile_n = self.form.tile_n
        tile_m = self.form.prefill_tile_m if m is None else _tile_of(m, self.form.max_tile_m)
        tiles_m = "?" if m is None else str(-(-m // tile_m))
        tiles_n = -(-n // tile_n)
        rows = "?" if m is None else str(m)
        size_m = "%tiles_m" if m is None else ""
        size_rows = "%rows" if m is None else ""
        dtype = self.dtype
        w, wp = f"tensor<{n}x{k}x{dtype}>", f"tensor<{tiles_n}x{k}x{tile_n}x1x{dtype}>"
        x, xp = f"tensor<{rows}x{k}xf32>", f"tensor<{tiles_m}x{k}x{tile_m}x1xf32>"
        yp, y = f"tensor<{tiles_m}x{tiles_n}x{tile_m}x{tile_n}xf32>", f"tensor<{rows}x{n}xf32>"
        pad_w = "" if n % tile_n == 0 else f" padding_value(%zero_w : {dtype})"
        pad_x = "" if m is not None and m % tile_m == 0 else " padding_value(%zero : f32)"
        return [
            f"%tile_m = arith.constant {tile_m} : index",
            f"%zero_w = arith.constant 0.0 : {dtype}",
            "%tiles_m = arith.ceildivui %rows, %tile_m : index",
            f"%w_empty = tensor.empty() : {wp}",
            f"%w_packed = linalg.pack %w{pad_w} inner_dims_pos = [0, 1] "
            f"inner_tiles = [{tile_n}, 1] into %w_empty : {w} -> {wp}",
            f"%x_empty = tensor.empty({size_m}) : {xp}",
            f"%x_packed = linalg.pack %x{pad_x} inner_dims_pos = [0, 1] "
            f"inner_tiles = [{tile_m}, 1] into %x_empty : {x} -> {xp}",
            f"%acc_empty = tensor.empty({size_m}) : {yp}",
            f"%acc = linalg.fill ins(%zero : f32) outs(%acc_empty : {yp}) -> {yp}",
            f"%y_packed = linalg.mmt4d ins(%x_packed, %w_packed : {xp}, {wp}) "
            f"outs(%acc : {yp}) -> {yp}",
            f"%y_empty = tensor.empty({size_rows}) : {y}",
            f"%y = linalg.unpack %y_packed inner_dims_pos = [0, 1] "
            f"inner_tiles = [{tile_m}, {tile_n}] into %y_empty : {yp} -> {y}",
        ]

    def _plain(self, rows: str, k: int, n: int) -> list[str]:
        size_rows = "%rows" if rows == "?" else ""
        y = f"tensor<{rows}x{n}xf32>"
        lines = [
            f"%y_empty = tensor.empty({size_rows}) : {y}",
            f"%acc = linalg.fill ins(%zero : f32) outs(%y_empty : {y}) -> {y}",
        ]
        operand = "%x"
        if self.dtype != "f32":
            operand = "%x_narrow"
            narrow = f"tensor<{rows}x{k}x{self.dtype}>"
            lines += [
                f"%x_empty = tensor.empty({size_rows}) : {narrow}",
                f"%x_narrow = linalg.generic {{indexing_maps = [{_ROWS}, {_ROWS}], "
                f'iterator_types = ["parallel", "parallel"]}} ins(%x : tensor<{rows}x{k}xf32>) '
                f"outs(%x_empty : {narrow}) {{",
                f"^bb0(%in: f32, %out: {self.dtype}):",
                f"  %t = arith.truncf %in : f32 to {self.dtype}",
                f"  linalg.yield %t : {self.dtype}",
                f"}} -> {narrow}",
            ]
        return [
            *lines,
            f"%y = linalg.matmul indexing_maps = [affine_map<(m, n, k) -> (m, k)>, "
            f"affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>] "
            f"ins({operand}, %w : tensor<{rows}x{k}x{self.dtype}>, tensor<{n}x{k}x{self.dtype}>) "
            f"outs(%acc : {y}) -> {y}",
        ]

    def _add_bias(self, rows: str, n: int) -> list[str]:
        y = f"tensor<{rows}x{n}xf32>"
        size_rows = "%rows" if rows == "?" else ""
        widen = (
            ["  %wide = arith.addf %b, %zero : f32"]
            if self.dtype == "f32"
            else [f"  %wide = arith.extf %b : {self.dtype} to f32"]
        )
        return [
            f"%sum_empty = tensor.empty({size_rows}) : {y}",
            f"%sum = linalg.generic {{indexing_maps = [{_ROWS}, affine_map<(m, n) -> (n)>, {_ROWS}], "
            f'iterator_types = ["parallel", "parallel"]}} '
            f"ins(%y, %bias : {y}, tensor<{n}x{self.dtype}>) outs(%sum_empty : {y}) {{",
            f"^bb0(%in: f32, %b: {self.dtype}, %out: f32):",
            *widen,
            "  %s = arith.addf %in, %wide : f32",
            "  linalg.yield %s : f32",
            f"}} -> {y}",
        ]


_ROWS = "affine_map<(m, n) -> (m, n)>"


def _tile_of(m: int, limit: int) -> int:
    """The smallest power of two that holds m rows, at most `limit`."""
    tile = 1
    while tile < m and tile < limit:
        tile *= 2
    return tile
