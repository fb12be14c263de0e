"""Products with weights, written for the target: x (M, K) f32, weight (N, K) -> (M, N) f32, and the
MLP around three of them.

Two forms, chosen per target:

    packed   The weight is packed into tiles of `tile_n` rows, once, when the module loads (the
             packing is a constant expression); activations stay f32 and the weight is widened in
             registers. For CPUs without bf16 arithmetic: the generic product of two bf16 operands
             is scalar code there, and the compiler's own tiling swaps operands when M is dynamic,
             so that the narrow weight is widened once for every row instead of once for all.
             With AVX2, products of more than `max_tile_m` rows are kernels of `row_products.py`;
             those of a dynamic number only if it is at least a kernel's tile. Others take tiles of
             activations, in which the MLP stays from its first product to its last.
    plain    A matmul of two operands of the weight's dtype with f32 accumulation: what GPUs have
             instructions for, and what the compiler's data tiling packs itself on CPUs with bf16
             arithmetic.

Quantized weights are i8, each row with an f32 scale of its own, by which a product's result is
multiplied. With AVX2, activations are rounded to 8 bits too, and products of any number of rows are
kernels of `whole_products.py`. Elsewhere weights are widened inside the product (plain: to the
dtype of the operands, in which whole numbers up to 127 are exact).

Legend: M rows of activations, K columns, N rows of a weight, I columns of the MLP, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shark_llm.export.packed import LinearForm, PackedProducts, Tiles
from shark_llm.export.row_products import MAX_ROWS, PANEL, product_function
from shark_llm.export.whole_products import (
    rounded_rows,
    rounding_function,
    whole_product_function,
)
from shark_llm.model.llama import rounding_group


@dataclass
class LinearLibrary:
    """The product functions that a module needs, each written once."""

    form: LinearForm
    dtype: str
    """Of biases, of weights that are not quantized, and of the operands of plain products."""
    quantized: bool = False
    """Weights are i8 and have scales."""
    min_rows: int = 1
    """Of products whose number of rows is dynamic."""
    functions: dict[str, str] = field(default_factory=dict)

    @property
    def packed(self) -> PackedProducts:
        """Writes the products in tiles."""
        return PackedProducts(form=self.form, dtype="i8" if self.quantized else self.dtype)

    def function(self, m: int | None, k: int, n: int, *, bias: bool) -> str:
        """The symbol of a product with `m` rows (None: dynamic), written on first use.

        Arguments x (M, K), weight (N, K), its scale (N) where weights are quantized and, with
        `bias`, bias (N); result (M, N).
        """
        name = f"linear.{_rows_name(m)}x{k}x{n}{'.bias' if bias else ''}"
        if name not in self.functions:
            lines = self._product(m, k, n, "%x", "%w", "%y", scale="%scale")
            if bias:
                lines += self._add_bias(m, n, "%y", "%bias", "%sum")
            arguments = [f"%w: {self.packed.tensor(n, k)}"]
            arguments += [f"%scale: tensor<{n}xf32>"] if self.quantized else []
            arguments += [f"%bias: {self._bias(n)}"] if bias else []
            self._write(name, m, k, n, arguments, lines, "%sum" if bias else "%y")
        return name

    def mlp(
        self, m: int | None, h: int, i: int, *, gate_bias: bool, up_bias: bool, down_bias: bool
    ) -> str:
        """The symbol of down(silu(gate(x)) * up(x)), written on first use. Source: LlamaMLP.

        Arguments x (M, H), the weights of gate (I, H), up (I, H) and down (H, I), then their scales
        where they are quantized and the biases that there are, in the same order; result (M, H).
        """
        present = {"g": gate_bias, "u": up_bias, "d": down_bias}
        biases = [f"b{key}" for key, is_there in present.items() if is_there]
        name = f"mlp.{_rows_name(m)}x{h}x{i}{''.join(f'.{b}' for b in biases)}"
        if name in self.functions:
            return name
        arguments = [
            f"%wg: {self.packed.tensor(i, h)}",
            f"%wu: {self.packed.tensor(i, h)}",
            f"%wd: {self.packed.tensor(h, i)}",
            *(
                f"%s{key}: tensor<{h if key == 'd' else i}xf32>"
                for key in ("gud" if self.quantized else "")
            ),
            *(f"%{b}: {self._bias(h if b == 'bd' else i)}" for b in biases),
        ]
        kernels = self._by_rows(m) or self._whole(h) or self._whole(i)
        if self.form.form == "packed" and not kernels and i % self.form.tile_n == 0:
            lines = self._packed_mlp(m, h, i, gate_bias=gate_bias, up_bias=up_bias)
        else:
            lines = []
            for key in ("g", "u"):
                lines += self._product(m, h, i, "%x", f"%w{key}", f"%{key}_sum", scale=f"%s{key}")
                lines += (
                    self._add_bias(m, i, f"%{key}_sum", f"%b{key}", f"%{key}_all")
                    if present[key]
                    else []
                )
            g, u = (f"%{key}_all" if present[key] else f"%{key}_sum" for key in ("g", "u"))
            tiles = self.packed.tiles(m)
            lines += self._gate(f"tensor<{tiles.rows}x{i}xf32>", tiles.size_rows, 2, g, u, "%m")
            lines += self._product(m, i, h, "%m", "%wd", "%y", scale="%sd")
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
        tiles = self.packed.tiles(m)
        x, y = f"tensor<{tiles.rows}x{k}xf32>", f"tensor<{tiles.rows}x{n}xf32>"
        prologue = [
            "%c0 = arith.constant 0 : index",
            "%zero = arith.constant 0.0 : f32",
            "%one = arith.constant 1.0 : f32",
            "%zero_w = arith.constant 0 : i8"
            if self.quantized
            else f"%zero_w = arith.constant 0.0 : {self.dtype}",
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

    def _product(
        self, m: int | None, k: int, n: int, x: str, w: str, y: str, *, scale: str
    ) -> list[str]:
        """`scale` is read only where weights are quantized."""
        if self.form.form == "plain":
            return self._plain_product(m, k, n, x, w, y, scale)
        if self._by_rows(m) or self._whole(k):
            return self._row_product(m, k, n, (x, w, scale), y)
        tiles = self.packed.tiles(m)
        return [
            *self.packed.pack_rows(tiles, k, x, f"{y}_x"),
            *self.packed.pack_weight(k, n, w, f"{y}_w"),
            *self.packed.product(tiles, k, n, f"{y}_x", f"{y}_w", f"{y}_packed"),
            *self._unpack(m, n, f"{y}_packed", scale, y),
        ]

    def _by_rows(self, m: int | None) -> bool:
        """Whether products of `m` rows are vector code of `row_products`."""
        form = self.form
        if not form.by_rows:
            return False
        return self.min_rows >= MAX_ROWS if m is None else m > form.max_tile_m

    def _whole(self, k: int) -> bool:
        """Whether products over `k` columns, of whatever number of rows, are `whole_products`.

        The packed weight is another one then, so it is all of them or none.
        """
        rounds = self.form.rounds_rows(quantized=self.quantized, min_rows=self.min_rows)
        return rounds and rounding_group(k) is not None

    def _row_product(
        self, m: int | None, k: int, n: int, operands: tuple[str, str, str], y: str
    ) -> list[str]:
        """`operands`: x, the weight, its scale."""
        x, w, scale = operands
        tiles = self.packed.tiles(m)
        panels, dtype = -(-n // PANEL), self.packed.dtype
        x_type = f"tensor<{tiles.rows}x{k}xf32>"
        name, depth, lines = f"rows.{_rows_name(m)}x{k}x{n}", 1, []
        if self._whole(k):
            depth = 2
            if name not in self.functions:
                self.functions[name] = whole_product_function(name, m, k, n)
            rounding = f"rounded.{_rows_name(m)}x{k}"
            if rounding not in self.functions:
                self.functions[rounding] = rounding_function(rounding, m, k)
            rounded_type = rounded_rows(m, k)
            lines.append(f"{y}_x = func.call @{rounding}({x}) : ({x_type}) -> {rounded_type}")
            x, x_type = f"{y}_x", rounded_type
        elif name not in self.functions:
            function = product_function(name, m, k, n, dtype, scaled=self.quantized)
            self.functions[name] = function
        whole = f"tensor<{tiles.rows}x{panels * PANEL}xf32>"
        packed, flat = (
            self.packed.tensor(panels, k // depth, PANEL, depth),
            self.packed.tensor(panels, k * PANEL),
        )
        lines += [
            *self.packed.pack_weight(k, n, w, f"{y}_w", depth),
            f"{y}_flat = tensor.collapse_shape {y}_w [[0], [1, 2, 3]] : {packed} into {flat}",
        ]
        passed, types = f"{x}, {y}_flat", f"{x_type}, {flat}"
        if self.quantized:
            padded = f"tensor<{panels * PANEL}xf32>"
            lines += [
                f"{y}_scale = tensor.pad {scale} low[0] high[{panels * PANEL - n}] {{",
                "^bb0(%i: index):",
                "  tensor.yield %zero : f32",
                f"}} : tensor<{n}xf32> to {padded}",
            ]
            passed, types = f"{passed}, {y}_scale", f"{types}, {padded}"
        result = y if n % PANEL == 0 else f"{y}_padded"
        lines.append(f"{result} = func.call @{name}({passed}) : ({types}) -> {whole}")
        if result != y:
            count = tiles.size_rows or tiles.rows
            lines.append(
                f"{y} = tensor.extract_slice {result}[0, 0] [{count}, {n}] [1, 1] : {whole} to "
                f"tensor<{tiles.rows}x{n}xf32>"
            )
        return lines

    def _unpack(self, m: int | None, n: int, packed: str, scale: str, y: str) -> list[str]:
        """Unpacked first, then scaled: the compiler makes one pass of that, and of one row none but
        the product's own."""
        tiles = self.packed.tiles(m)
        if not self.quantized:
            return self.packed.unpack(tiles, n, packed, y)
        return [
            *self.packed.unpack(tiles, n, packed, f"{y}_whole"),
            *self._scaled(m, n, f"{y}_whole", scale, y),
        ]

    def _packed_mlp(
        self, m: int | None, h: int, i: int, *, gate_bias: bool, up_bias: bool
    ) -> list[str]:
        """Silu on the tiles of gate and up, and these turned into the tiles that down reads: one
        pass, where unpacking and packing again would be scalar code.

        Two products, not one of joined weights: the compiler shares a packed weight among entry
        points, but not a joined one.
        """
        tiles = self.packed.tiles(m)
        half = self.packed.packed_type(tiles, i)
        lines = self.packed.pack_rows(tiles, h, "%x", "%x_packed")
        for key in ("g", "u"):
            lines += self.packed.pack_weight(h, i, f"%w{key}", f"%w{key}_packed")
            product = f"%{key}_whole" if self.quantized else f"%{key}"
            lines += self.packed.product(tiles, h, i, "%x_packed", f"%w{key}_packed", product)
            if self.quantized:
                names = (product, f"%s{key}", f"%{key}")
                lines += self._by_tile("mulf", tiles, i, "f32", names)
        operands = {}
        for key, has_bias in (("g", gate_bias), ("u", up_bias)):
            operands[key] = f"%{key}_all" if has_bias else f"%{key}"
            if has_bias:
                names = (f"%{key}", f"%b{key}", f"%{key}_all")
                lines += self._by_tile("addf", tiles, i, self.dtype, names)
        lines += self._gate(half, tiles.size_tiles, 4, operands["g"], operands["u"], "%m")
        return [
            *lines,
            *self.packed.columns_to_rows(tiles, i, "%m", "%m_packed"),
            *self.packed.pack_weight(i, h, "%wd", "%wd_packed"),
            *self.packed.product(tiles, i, h, "%m_packed", "%wd_packed", "%y_packed"),
            *self._unpack(m, h, "%y_packed", "%sd", "%y"),
        ]

    def _plain_product(
        self, m: int | None, k: int, n: int, x: str, w: str, y: str, scale: str
    ) -> list[str]:
        tiles = self.packed.tiles(m)
        result = f"tensor<{tiles.rows}x{n}xf32>"
        product = f"{y}_whole" if self.quantized else y
        lines = [
            f"{product}_empty = tensor.empty({tiles.size_rows}) : {result}",
            f"{product}_zero = linalg.fill ins(%zero : f32) outs({product}_empty : {result}) "
            f"-> {result}",
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
        x_type, w_type = f"tensor<{tiles.rows}x{k}x{self.dtype}>", f"tensor<{n}x{k}x{self.dtype}>"
        if self.quantized:
            lines += [
                f"{y}_wide_empty = tensor.empty() : {w_type}",
                f"{y}_wide = linalg.generic {{indexing_maps = [{_ROWS}, {_ROWS}], "
                f'iterator_types = ["parallel", "parallel"]}} '
                f"ins({w} : {self.packed.tensor(n, k)}) outs({y}_wide_empty : {w_type}) {{",
                f"^bb0(%in: i8, %out: {self.dtype}):",
                f"  %t = arith.sitofp %in : i8 to {self.dtype}",
                f"  linalg.yield %t : {self.dtype}",
                f"}} -> {w_type}",
            ]
        lines += [
            f"{product} = linalg.matmul indexing_maps = [affine_map<(m, n, k) -> (m, k)>, "
            f"affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>] "
            f"ins({operand}, {f'{y}_wide' if self.quantized else w} : {x_type}, {w_type}) "
            f"outs({product}_zero : {result}) -> {result}",
        ]
        return lines + (self._scaled(m, n, product, scale, y) if self.quantized else [])

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

    def _scaled(self, m: int | None, n: int, y: str, scale: str, result: str) -> list[str]:
        """Once for each result, not once for each weight: the sum over K is of whole numbers times
        activations."""
        tiles = self.packed.tiles(m)
        tensors = (f"tensor<{tiles.rows}x{n}xf32>", f"tensor<{n}xf32>")
        return _with_columns("mulf", tensors, tiles.size_rows, (y, scale, result))

    def _add_bias(self, m: int | None, n: int, y: str, bias: str, result: str) -> list[str]:
        tiles = self.packed.tiles(m)
        tensors = (f"tensor<{tiles.rows}x{n}xf32>", self._bias(n))
        return _with_columns("addf", tensors, tiles.size_rows, (y, bias, result))

    def _by_tile(
        self, operation: str, tiles: Tiles, n: int, dtype: str, names: tuple[str, str, str]
    ) -> list[str]:
        """`_with_columns` of a packed result, whose tiles are full, and a plain vector (N)."""
        y, vector, result = names
        tile_n = self.form.tile_n
        plain, by_tile = f"tensor<{n}x{dtype}>", f"tensor<{n // tile_n}x{tile_n}x{dtype}>"
        tensors = (self.packed.packed_type(tiles, n), by_tile)
        return [
            f"{result}_tiles = tensor.expand_shape {vector} [[0, 1]] output_shape "
            f"[{n // tile_n}, {tile_n}] : {plain} into {by_tile}",
            *_with_columns(operation, tensors, tiles.size_tiles, (y, f"{result}_tiles", result)),
        ]

    def _bias(self, *dims: int) -> str:
        """The type of a bias in that shape."""
        return f"tensor<{''.join(f'{d}x' for d in dims)}{self.dtype}>"


def _with_columns(
    operation: str, tensors: tuple[str, str], sizes: str, names: tuple[str, str, str]
) -> list[str]:
    """y (M, N) with a vector (N), or y in tiles with that in tiles: `operation` is addf or mulf.

    names: y, the vector, and the result. The vector's dtype is widened to f32.
    """
    y, vector, result = names
    whole, part = tensors
    rank = whole.count("x")
    same = _identity(rank)
    columns = "affine_map<(a, b) -> (b)>" if rank == 2 else "affine_map<(a, b, c, d) -> (b, d)>"
    dtype = part[:-1].rpartition("x")[2]
    widen = [] if dtype == "f32" else [f"  %wide = arith.extf %column : {dtype} to f32"]
    return [
        f"{result}_empty = tensor.empty({sizes}) : {whole}",
        f"{result} = linalg.generic {{indexing_maps = [{same}, {columns}, {same}], "
        f"iterator_types = [{_parallel(rank)}]}} "
        f"ins({y}, {vector} : {whole}, {part}) outs({result}_empty : {whole}) {{",
        f"^bb0(%in: f32, %column: {dtype}, %out: f32):",
        *widen,
        f"  %r = arith.{operation} %in, {'%wide' if widen else '%column'} : f32",
        "  linalg.yield %r : f32",
        f"}} -> {whole}",
    ]


_ROWS = "affine_map<(m, n) -> (m, n)>"


def _identity(rank: int) -> str:
    dims = ", ".join("abcd"[:rank])
    return f"affine_map<({dims}) -> ({dims})>"


def _parallel(rank: int) -> str:
    return ", ".join(['"parallel"'] * rank)


def _rows_name(m: int | None) -> str:
    return "dyn" if m is None else str(m)
