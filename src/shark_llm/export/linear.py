"""Products with weights, written for the target: x (M, K) f32, weight (N, K) -> (M, N) f32, and the
MLP around three of them.

Two forms, chosen per target:

    packed   The weight is packed into tiles of `tile_n` rows, once, when the module loads (the
             packing is a constant expression); activations stay f32 and the weight is widened in
             registers. For CPUs without bf16 arithmetic: the generic product of two bf16 operands
             is scalar code there, and the compiler's own tiling swaps operands when M is dynamic,
             so that the narrow weight is widened once for every row instead of once for all.
             The MLP stays in tiles from its first product to its last.
    plain    A matmul of two operands of the weight's dtype with f32 accumulation: what GPUs have
             instructions for, and what the compiler's data tiling packs itself on CPUs with bf16
             arithmetic.

Legend: M rows of activations, K columns, N rows of a weight, I columns of the MLP, H hidden size.
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
    prefill_tile_m: int = 6
    """6 x 16 f32 sums fill 12 of the 16 registers of AVX2; the rest hold operands."""
    shares_layers: bool = False
    """Between several ranks all chunks of layers are one function, which takes their weights as
    arguments: a module then compiles in the same time whatever its depth. Not where the compiler or
    this form packs weights, which happens once only for those that a function loads itself."""


@dataclass(frozen=True, kw_only=True)
class _Tiles:
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


@dataclass
class LinearLibrary:
    """The product functions that a module needs, each written once."""

    form: LinearForm
    dtype: str
    functions: dict[str, str] = field(default_factory=dict)

    def function(self, m: int | None, k: int, n: int, *, bias: bool) -> str:
        """The symbol of a product with `m` rows (None: dynamic), written on first use.

        Arguments x (M, K), weight (N, K) and, with `bias`, bias (N); result (M, N).
        """
        name = f"linear.{_rows_name(m)}x{k}x{n}{'.bias' if bias else ''}"
        if name not in self.functions:
            lines = self._product(m, k, n, "%x", "%w", "%y")
            if bias:
                lines += self._add_bias(m, n, "%y", "%bias", "%sum")
            arguments = [f"%w: {self._type(n, k)}"]
            arguments += [f"%bias: {self._type(n)}"] if bias else []
            self._write(name, m, k, n, arguments, lines, "%sum" if bias else "%y")
        return name

    def mlp(
        self, m: int | None, h: int, i: int, *, gate_bias: bool, up_bias: bool, down_bias: bool
    ) -> str:
        """The symbol of down(silu(gate(x)) * up(x)), written on first use. Source: LlamaMLP.

        Arguments x (M, H), the weights of gate (I, H), up (I, H) and down (H, I), then the biases
        that there are, in the same order; result (M, H).
        """
        present = {"g": gate_bias, "u": up_bias, "d": down_bias}
        biases = [f"b{key}" for key, is_there in present.items() if is_there]
        name = f"mlp.{_rows_name(m)}x{h}x{i}{''.join(f'.{b}' for b in biases)}"
        if name in self.functions:
            return name
        arguments = [
            f"%wg: {self._type(i, h)}",
            f"%wu: {self._type(i, h)}",
            f"%wd: {self._type(h, i)}",
            *(f"%{b}: {self._type(h if b == 'bd' else i)}" for b in biases),
        ]
        if self.form.form == "packed" and i % self.form.tile_n == 0:
            lines = self._packed_mlp(m, h, i, gate_bias=gate_bias, up_bias=up_bias)
        else:
            lines = []
            for key in ("g", "u"):
                lines += self._product(m, h, i, "%x", f"%w{key}", f"%{key}_sum")
                lines += (
                    self._add_bias(m, i, f"%{key}_sum", f"%b{key}", f"%{key}_all")
                    if present[key]
                    else []
                )
            g, u = (f"%{key}_all" if present[key] else f"%{key}_sum" for key in ("g", "u"))
            tiles = self._tiles(m)
            lines += self._gate(f"tensor<{tiles.rows}x{i}xf32>", tiles.size_rows, 2, g, u, "%m")
            lines += self._product(m, i, h, "%m", "%wd", "%y")
        if down_bias:
            lines += self._add_bias(m, h, "%y", "%bd", "%sum")
        self._write(name, m, h, h, arguments, lines, "%sum" if down_bias else "%y")
        return name

    def _write(
        self,
        name: str,
        m: int | None,
        k: int,
        n: int,
        arguments: list[str],
        lines: list[str],
        result: str,
    ) -> None:
        tiles = self._tiles(m)
        x, y = f"tensor<{tiles.rows}x{k}xf32>", f"tensor<{tiles.rows}x{n}xf32>"
        prologue = [
            "%c0 = arith.constant 0 : index",
            "%zero = arith.constant 0.0 : f32",
            "%one = arith.constant 1.0 : f32",
            f"%zero_w = arith.constant 0.0 : {self.dtype}",
            f"%rows = tensor.dim %x, %c0 : {x}",
            f"%tile_m = arith.constant {tiles.tile} : index",
            "%tiles_m = arith.ceildivui %rows, %tile_m : index",
        ]
        self.functions[name] = "\n".join(
            [
                f"  func.func private @{name}(%x: {x}, {', '.join(arguments)}) -> {y} {{",
                *(f"    {line}" for line in (*prologue, *lines)),
                f"    return {result} : {y}",
                "  }",
            ]
        )

    def _type(self, *dims: int) -> str:
        return f"tensor<{''.join(f'{d}x' for d in dims)}{self.dtype}>"

    def _tiles(self, m: int | None) -> _Tiles:
        if m is None:
            return _Tiles(rows="?", tiles="?", tile=self.form.prefill_tile_m, exact=False)
        tile = _tile_of(m, self.form.max_tile_m)
        return _Tiles(rows=str(m), tiles=str(-(-m // tile)), tile=tile, exact=m % tile == 0)

    def _product(self, m: int | None, k: int, n: int, x: str, w: str, y: str) -> list[str]:
        if self.form.form == "plain":
            return self._plain_product(m, k, n, x, w, y)
        tiles = self._tiles(m)
        stem = y.removeprefix("%")
        return [
            *self._pack_rows(tiles, k, x, f"%{stem}_x"),
            *self._pack_weight(k, n, w, f"%{stem}_w"),
            *self._mmt4d(tiles, k, n, f"%{stem}_x", f"%{stem}_w", f"%{stem}_packed"),
            *self._unpack(tiles, n, f"%{stem}_packed", y),
        ]

    def _packed_mlp(
        self, m: int | None, h: int, i: int, *, gate_bias: bool, up_bias: bool
    ) -> list[str]:
        """Silu on the tiles of gate and up, and these turned into the tiles that down reads: one
        pass, where unpacking and packing again would be scalar code.

        Two products, not one of joined weights: the compiler shares a packed weight among entry
        points, but not a joined one.
        """
        tiles, tile_n = self._tiles(m), self.form.tile_n
        half = self._packed_type(tiles, i)
        lines = self._pack_rows(tiles, h, "%x", "%x_packed")
        for key in ("g", "u"):
            lines += self._pack_weight(h, i, f"%w{key}", f"%w{key}_packed")
            lines += self._mmt4d(tiles, h, i, "%x_packed", f"%w{key}_packed", f"%{key}")
        operands = {}
        for key, has_bias in (("g", gate_bias), ("u", up_bias)):
            operands[key] = f"%{key}_all" if has_bias else f"%{key}"
            if has_bias:
                by_tile = self._type(i // tile_n, tile_n)
                lines += [
                    f"%b{key}_tiles = tensor.expand_shape %b{key} [[0, 1]] output_shape "
                    f"[{i // tile_n}, {tile_n}] : {self._type(i)} into {by_tile}",
                    *self._sum(
                        half,
                        tiles.size_tiles,
                        "affine_map<(a, b, c, d) -> (b, d)>",
                        by_tile,
                        4,
                        (f"%{key}", f"%b{key}_tiles", f"%{key}_all"),
                    ),
                ]
        lines += self._gate(half, tiles.size_tiles, 4, operands["g"], operands["u"], "%m")
        return [
            *lines,
            *self._columns_to_rows(tiles, i, "%m", "%m_packed"),
            *self._pack_weight(i, h, "%wd", "%wd_packed"),
            *self._mmt4d(tiles, i, h, "%m_packed", "%wd_packed", "%y_packed"),
            *self._unpack(tiles, h, "%y_packed", "%y"),
        ]

    def _rows_type(self, tiles: _Tiles, k: int) -> str:
        return f"tensor<{tiles.tiles}x{k}x{tiles.tile}x1xf32>"

    def _packed_type(self, tiles: _Tiles, n: int) -> str:
        tile_n = self.form.tile_n
        return f"tensor<{tiles.tiles}x{-(-n // tile_n)}x{tiles.tile}x{tile_n}xf32>"

    def _pack_rows(self, tiles: _Tiles, k: int, x: str, result: str) -> list[str]:
        """(M, K) -> (M/tile, K, tile, 1)."""
        plain, packed = f"tensor<{tiles.rows}x{k}xf32>", self._rows_type(tiles, k)
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

    def _pack_weight(self, k: int, n: int, w: str, result: str) -> list[str]:
        """(N, K) -> (N/tile, K, tile, 1)."""
        tile_n = self.form.tile_n
        plain, packed = self._type(n, k), self._type(-(-n // tile_n), k, tile_n, 1)
        pad = "" if n % tile_n == 0 else f" padding_value(%zero_w : {self.dtype})"
        return [
            f"{result}_empty = tensor.empty() : {packed}",
            f"{result} = linalg.pack {w}{pad} inner_dims_pos = [0, 1] "
            f"inner_tiles = [{tile_n}, 1] into {result}_empty : {plain} -> {packed}",
        ]

    def _mmt4d(self, tiles: _Tiles, k: int, n: int, x: str, w: str, result: str) -> list[str]:
        tile_n = self.form.tile_n
        xp, wp = self._rows_type(tiles, k), self._type(-(-n // tile_n), k, tile_n, 1)
        yp = self._packed_type(tiles, n)
        return [
            f"{result}_empty = tensor.empty({tiles.size_tiles}) : {yp}",
            f"{result}_zero = linalg.fill ins(%zero : f32) outs({result}_empty : {yp}) -> {yp}",
            f"{result} = linalg.mmt4d ins({x}, {w} : {xp}, {wp}) "
            f"outs({result}_zero : {yp}) -> {yp}",
        ]

    def _unpack(self, tiles: _Tiles, n: int, packed: str, result: str) -> list[str]:
        """(M/tile, N/tile_n, tile, tile_n) -> (M, N)."""
        tile_n = self.form.tile_n
        yp, y = self._packed_type(tiles, n), f"tensor<{tiles.rows}x{n}xf32>"
        if tiles.is_one_row and n % tile_n == 0:
            return [f"{result} = tensor.collapse_shape {packed} [[0], [1, 2, 3]] : {yp} into {y}"]
        return [
            f"{result}_rows = tensor.empty({tiles.size_rows}) : {y}",
            f"{result} = linalg.unpack {packed} inner_dims_pos = [0, 1] "
            f"inner_tiles = [{tiles.tile}, {tile_n}] into {result}_rows : {yp} -> {y}",
        ]

    def _columns_to_rows(self, tiles: _Tiles, n: int, packed: str, result: str) -> list[str]:
        """A product's result as the next one's operand: (M/tile, N/tile_n, tile, tile_n) ->
        (M/tile, N, tile, 1)."""
        tile_n, tile = self.form.tile_n, tiles.tile
        before, after = self._packed_type(tiles, n), self._rows_type(tiles, n)
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

    def _plain_product(self, m: int | None, k: int, n: int, x: str, w: str, y: str) -> list[str]:
        tiles = self._tiles(m)
        result = f"tensor<{tiles.rows}x{n}xf32>"
        lines = [
            f"{y}_empty = tensor.empty({tiles.size_rows}) : {result}",
            f"{y}_zero = linalg.fill ins(%zero : f32) outs({y}_empty : {result}) -> {result}",
        ]
        operand = x
        if self.dtype != "f32":
            operand = f"{y}_narrow"
            narrow = f"tensor<{tiles.rows}x{k}x{self.dtype}>"
            lines += [
                f"{y}_narrow_empty = tensor.empty({tiles.size_rows}) : {narrow}",
                f"{operand} = linalg.generic {{indexing_maps = [{_ROWS}, {_ROWS}], "
                f'iterator_types = ["parallel", "parallel"]}} '
                f"ins({x} : tensor<{tiles.rows}x{k}xf32>) outs({y}_narrow_empty : {narrow}) {{",
                f"^bb0(%in: f32, %out: {self.dtype}):",
                f"  %t = arith.truncf %in : f32 to {self.dtype}",
                f"  linalg.yield %t : {self.dtype}",
                f"}} -> {narrow}",
            ]
        x_type, w_type = f"tensor<{tiles.rows}x{k}x{self.dtype}>", self._type(n, k)
        return [
            *lines,
            f"{y} = linalg.matmul indexing_maps = [affine_map<(m, n, k) -> (m, k)>, "
            f"affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>] "
            f"ins({operand}, {w} : {x_type}, {w_type}) outs({y}_zero : {result}) -> {result}",
        ]

    def _gate(self, tensor: str, sizes: str, rank: int, g: str, u: str, result: str) -> list[str]:
        """silu(g) * u = g / (1 + exp(-g)) * u, element by element: `llama.gate`."""
        same = _identity(rank)
        return [
            f"{result}_empty = tensor.empty({sizes}) : {tensor}",
            f"{result} = linalg.generic {{indexing_maps = [{same}, {same}, {same}], "
            f"iterator_types = [{_parallel(rank)}]}} ins({g}, {u} : {tensor}, {tensor}) "
            f"outs({result}_empty : {tensor}) {{",
            "^bb0(%in: f32, %by: f32, %out: f32):",
            "  %negative = arith.negf %in : f32",
            "  %exp = math.exp %negative : f32",
            "  %below = arith.addf %exp, %one : f32",
            "  %silu = arith.divf %in, %below : f32",
            "  %product = arith.mulf %silu, %by : f32",
            "  linalg.yield %product : f32",
            f"}} -> {tensor}",
        ]

    def _add_bias(self, m: int | None, n: int, y: str, bias: str, result: str) -> list[str]:
        tiles = self._tiles(m)
        tensor = f"tensor<{tiles.rows}x{n}xf32>"
        names = (y, bias, result)
        map_of_bias = "affine_map<(a, b) -> (b)>"
        return self._sum(tensor, tiles.size_rows, map_of_bias, self._type(n), 2, names)

    def _sum(
        self,
        tensor: str,
        sizes: str,
        map_of_bias: str,
        bias_type: str,
        rank: int,
        names: tuple[str, str, str],
    ) -> list[str]:
        """names: what is added to, the bias, and the result."""
        y, bias, result = names
        same = _identity(rank)
        widen = (
            ["  %wide = arith.addf %b, %zero : f32"]
            if self.dtype == "f32"
            else [f"  %wide = arith.extf %b : {self.dtype} to f32"]
        )
        return [
            f"{result}_empty = tensor.empty({sizes}) : {tensor}",
            f"{result} = linalg.generic {{indexing_maps = [{same}, {map_of_bias}, {same}], "
            f"iterator_types = [{_parallel(rank)}]}} "
            f"ins({y}, {bias} : {tensor}, {bias_type}) outs({result}_empty : {tensor}) {{",
            f"^bb0(%in: f32, %b: {self.dtype}, %out: f32):",
            *widen,
            "  %s = arith.addf %in, %wide : f32",
            "  linalg.yield %s : f32",
            f"}} -> {tensor}",
        ]


_ROWS = "affine_map<(m, n) -> (m, n)>"


def _identity(rank: int) -> str:
    dims = ", ".join("abcd"[:rank])
    return f"affine_map<({dims}) -> ({dims})>"


def _parallel(rank: int) -> str:
    return ", ".join(['"parallel"'] * rank)


def _rows_name(m: int | None) -> str:
    return "dyn" if m is None else str(m)


def _tile_of(m: int, limit: int) -> int:
    """The smallest power of two that holds m rows, at most `limit`."""
    tile = 1
    while tile < m and tile < limit:
        tile *= 2
    return tile
