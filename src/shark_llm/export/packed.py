"""Products with weights in tiles, as lines of MLIR, for CPUs without bf16 arithmetic: of few rows,
and of more where `row_products.py` is not for them.

The operands are packed so that a tile of results stays in registers over the whole of K:

    rows     (M, K)   -> (M/tile, K, tile, 1)            f32
    weight   (N, K)   -> (N/tile_n, K, tile_n, 1)        its own dtype, widened in registers
    result               (M/tile, N/tile_n, tile, tile_n) f32

Legend: M rows of activations, K columns, N rows of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shark_llm.export.row_products import MAX_ROWS
from shark_llm.export.tiling import largest_divisor


@dataclass(frozen=True, kw_only=True)
class LinearForm:
    """How products with weights are written. Tiles are read by the packed form only."""

    form: Literal["packed", "plain"]
    tile_n: int = 16
    max_tile_m: int = 4
    """Up to so many rows fill one tile. More are not for tiles if `by_rows`; else up to twice as
    many fill two, where these hold fewer rows that are none than tiles of `prefill_tile_m`, into
    which more rows are cut."""
    by_rows: bool = False
    """More rows than `max_tile_m` are taken where they lie: `row_products.py`, written for AVX2."""
    prefill_tile_m: int = 6
    """6 x 16 f32 sums fill 12 of the 16 registers of AVX2; the rest hold operands."""
    max_tiles_one_row: int = 6
    """How many tiles of a weight a product of one row reads side by side. Such a product is bound
    by memory, and a core waits less for six streams than for one."""
    shares_layers: bool = False
    """Between several ranks all chunks of layers are one function, which takes their weights as
    arguments: a module then compiles in the same time whatever its depth. Not where the compiler or
    this form packs weights, which happens once only for those that a function loads itself."""

    def rounds_rows(self, *, quantized: bool, min_rows: int) -> bool:
        """Whether activations are rounded to whole numbers before each product, where
        `llama.rounding_group` allows it, in a module whose products have a dynamic number of rows
        of at least `min_rows`."""
        return self.by_rows and quantized and min_rows >= MAX_ROWS


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """M in tiles: how many rows and tiles there are (`?` or a number)."""

    rows: str
    tiles: str
    tile: int
    exact: bool
    """The rows are known to fill the tiles."""

    @property
    def size_rows(self) -> str:
        return "%rows" if self.rows == "?" else ""

    @property
    def size_tiles(self) -> str:
        return "%tiles_m" if self.tiles == "?" else ""

    @property
    def is_one_row(self) -> bool:
        return self.rows == "1" and self.tile == 1


@dataclass(frozen=True, kw_only=True)
class PackedProducts:
    """Writes packing, product and unpacking for weights of one dtype."""

    form: LinearForm
    dtype: str

    def tensor(self, *dims: int) -> str:
        """The type of a tensor of the weights' dtype."""
        return f"tensor<{''.join(f'{d}x' for d in dims)}{self.dtype}>"

    def tiles(self, m: int | None) -> Tiles:
        """How `m` rows (None: dynamic) are tiled."""
        if m is None:
            return Tiles(rows="?", tiles="?", tile=self.form.prefill_tile_m, exact=False)
        sizes = (self.form.prefill_tile_m, self.form.max_tile_m)
        if m <= sizes[1]:
            tile = _power_of_two(m)
        elif m <= 2 * sizes[1]:
            tile = min(sizes, key=lambda size: -(-m // size) * size)
        else:
            tile = sizes[0]
        return Tiles(rows=str(m), tiles=str(-(-m // tile)), tile=tile, exact=m % tile == 0)

    def rows_type(self, tiles: Tiles, k: int) -> str:
        """The type of packed rows."""
        return f"tensor<{tiles.tiles}x{k}x{tiles.tile}x1xf32>"

    def packed_type(self, tiles: Tiles, n: int) -> str:
        """The type of a packed result."""
        tile_n = self.form.tile_n
        return f"tensor<{tiles.tiles}x{-(-n // tile_n)}x{tiles.tile}x{tile_n}xf32>"

    def pack_rows(self, tiles: Tiles, k: int, x: str, result: str) -> list[str]:
        """(M, K) -> (M/tile, K, tile, 1)."""
        plain, packed = f"tensor<{tiles.rows}x{k}xf32>", self.rows_type(tiles, k)
        if tiles.is_one_row:
            return [
                f"{result} = tensor.expand_shape {x} [[0], [1, 2, 3]] output_shape [1, {k}, 1, 1] "
                f": {plain} into {packed}"
            ]
        pad = "" if tiles.exact else " padding_value(%zero : f32)"
        return [
            f"{result}_empty = tensor.empty({tiles.size_tiles}) : {packed}",
            f"{result} = linalg.pack {x}{pad} inner_dims_pos = [0, 1] "
            f"inner_tiles = [{tiles.tile}, 1] into {result}_empty : {plain} -> {packed}",
        ]

    def pack_weight(self, k: int, n: int, w: str, result: str, depth: int = 1) -> list[str]:
        """(N, K) -> (N/tile, K/depth, tile, depth)."""
        tile_n = self.form.tile_n
        plain = self.tensor(n, k)
        packed = self.tensor(-(-n // tile_n), k // depth, tile_n, depth)
        pad = "" if n % tile_n == 0 else f" padding_value(%zero_w : {self.dtype})"
        return [
            f"{result}_empty = tensor.empty() : {packed}",
            f"{result} = linalg.pack {w}{pad} inner_dims_pos = [0, 1] "
            f"inner_tiles = [{tile_n}, {depth}] into {result}_empty : {plain} -> {packed}",
        ]

    @property
    def widening(self) -> list[str]:
        """From an element %in_w of a weight to %wide, an f32; nothing where it is one."""
        if self.dtype == "f32":
            return []
        operation = "sitofp" if self.dtype == "i8" else "extf"
        return [f"  %wide = arith.{operation} %in_w : {self.dtype} to f32"]

    def product(self, tiles: Tiles, k: int, n: int, x: str, w: str, result: str) -> list[str]:
        """Packed rows times a packed weight."""
        tile_n = self.form.tile_n
        side_by_side = largest_divisor(-(-n // tile_n), self.form.max_tiles_one_row)
        if tiles.is_one_row and side_by_side > 1:
            return self._one_row(k, n, side_by_side, x, w, result)
        xp, wp = self.rows_type(tiles, k), self.tensor(-(-n // tile_n), k, tile_n, 1)
        yp = self.packed_type(tiles, n)
        return [
            f"{result}_empty = tensor.empty({tiles.size_tiles}) : {yp}",
            f"{result}_zero = linalg.fill ins(%zero : f32) outs({result}_empty : {yp}) -> {yp}",
            f"{result} = linalg.mmt4d ins({x}, {w} : {xp}, {wp}) "
            f"outs({result}_zero : {yp}) -> {yp}",
        ]

    def _one_row(self, k: int, n: int, side_by_side: int, x: str, w: str, result: str) -> list[str]:
        """One row, some tiles t at once: y[t, j] = sum over k of x[k] * w[t, k, j].

        The tiling is given here, for the compiler's own takes one tile at a time.
        """
        tile_n, tiles = self.form.tile_n, -(-n // self.form.tile_n)
        grain = side_by_side * max(1, tiles // (side_by_side * _MAX_WORKGROUPS))
        x_flat, y_flat = f"tensor<{k}xf32>", f"tensor<{tiles}x{tile_n}xf32>"
        w_packed, w_flat = self.tensor(tiles, k, tile_n, 1), self.tensor(tiles, k, tile_n)
        wide = "%wide" if self.widening else "%in_w"
        return [
            f"{result}_x = tensor.collapse_shape {x} [[0, 1, 2, 3]] : tensor<1x{k}x1x1xf32> "
            f"into {x_flat}",
            f"{result}_w = tensor.collapse_shape {w} [[0], [1], [2, 3]] : {w_packed} into {w_flat}",
            f"{result}_empty = tensor.empty() : {y_flat}",
            f"{result}_zero = linalg.fill ins(%zero : f32) outs({result}_empty : {y_flat}) "
            f"-> {y_flat}",
            f"{result}_flat = linalg.generic {{indexing_maps = [affine_map<(t, j, k) -> (k)>, "
            f"affine_map<(t, j, k) -> (t, k, j)>, affine_map<(t, j, k) -> (t, j)>], "
            f'iterator_types = ["parallel", "parallel", "reduction"]}} '
            f"ins({result}_x, {result}_w : {x_flat}, {w_flat}) outs({result}_zero : {y_flat}) "
            f"attrs = {{compilation_info = #iree_codegen.compilation_info<lowering_config = "
            f"#iree_cpu.lowering_config<distribution = [{grain}, 0, 0], "
            f"vector_common_parallel = [{side_by_side}, {tile_n}, 0], "
            f"vector_reduction = [0, 0, 1]>, translation_info = "
            f"#iree_codegen.translation_info<pipeline = "
            f"#iree_cpu.pipeline<DoubleTilingExpert>>>}} {{",
            f"^bb0(%in_x: f32, %in_w: {self.dtype}, %out: f32):",
            *self.widening,
            f"  %product = arith.mulf %in_x, {wide} : f32",
            "  %s = arith.addf %out, %product : f32",
            "  linalg.yield %s : f32",
            f"}} -> {y_flat}",
            f"{result} = tensor.expand_shape {result}_flat [[0, 1], [2, 3]] output_shape "
            f"[1, {tiles}, 1, {tile_n}] : {y_flat} into tensor<1x{tiles}x1x{tile_n}xf32>",
        ]

    def unpack(self, tiles: Tiles, n: int, packed: str, result: str) -> list[str]:
        """(M/tile, N/tile_n, tile, tile_n) -> (M, N)."""
        tile_n = self.form.tile_n
        yp, y = self.packed_type(tiles, n), f"tensor<{tiles.rows}x{n}xf32>"
        if tiles.is_one_row and n % tile_n == 0:
            return [f"{result} = tensor.collapse_shape {packed} [[0], [1, 2, 3]] : {yp} into {y}"]
        return [
            f"{result}_rows = tensor.empty({tiles.size_rows}) : {y}",
            f"{result} = linalg.unpack {packed} inner_dims_pos = [0, 1] "
            f"inner_tiles = [{tiles.tile}, {tile_n}] into {result}_rows : {yp} -> {y}",
        ]

    def columns_to_rows(self, tiles: Tiles, n: int, packed: str, result: str) -> list[str]:
        """A product's result as the next one's operand: (M/tile, N/tile_n, tile, tile_n) ->
        (M/tile, N, tile, 1)."""
        tile_n, tile = self.form.tile_n, tiles.tile
        before, after = self.packed_type(tiles, n), self.rows_type(tiles, n)
        count = tiles.size_tiles or tiles.tiles
        turned = f"tensor<{tiles.tiles}x{n // tile_n}x{tile_n}x{tile}xf32>"
        flat = f"tensor<{tiles.tiles}x{n}x{tile}xf32>"
        if tile == 1:
            flat = f"tensor<{tiles.tiles}x{n}xf32>"
            return [
                f"{result}_flat = tensor.collapse_shape {packed} [[0], [1, 2, 3]] : "
                f"{before} into {flat}",
                f"{result} = tensor.expand_shape {result}_flat [[0], [1, 2, 3]] output_shape "
                f"[{count}, {n}, 1, 1] : {flat} into {after}",
            ]
        return [
            f"{result}_empty = tensor.empty({tiles.size_tiles}) : {turned}",
            f"{result}_turned = linalg.transpose ins({packed} : {before}) "
            f"outs({result}_empty : {turned}) permutation = [0, 1, 3, 2]",
            f"{result}_flat = tensor.collapse_shape {result}_turned [[0], [1, 2], [3]] : "
            f"{turned} into {flat}",
            f"{result} = tensor.expand_shape {result}_flat [[0], [1], [2, 3]] output_shape "
            f"[{count}, {n}, {tile}, 1] : {flat} into {after}",
        ]


_MAX_WORKGROUPS = 64
"""Into about how many parts a product of one row is cut at most."""


def _power_of_two(m: int) -> int:
    """The smallest power of two that holds m rows."""
    return 1 << (m - 1).bit_length()
