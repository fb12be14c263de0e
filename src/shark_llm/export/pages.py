"""Reading pages of a cache as copies of whole rows, written for the compiler.

torch's `index_select` becomes an element-wise operation whose every element looks its page up:
scalar code, 40 times slower. `iree_linalg_ext.gather` copies row by row.

Legend: P pages of the pool, K local kv heads, N batch rows, T pages per row, L page size,
D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PageReaders:
    """The reading functions that a module needs, each written once."""

    dtype: str
    page_size: int
    head_dim: int
    functions: dict[str, str] = field(default_factory=dict)

    def function(self, batch_size: int, num_kv_heads: int, pages: int | None) -> str:
        """The symbol of a function (cache (P, K*L*D), rows (N*K*T) i64) -> (N, K, T, L, D).

        `rows` are those of `kv_cache.head_rows`; `pages` is T, None where it is dynamic.
        """
        n, k, length, d = batch_size, num_kv_heads, self.page_size, self.head_dim
        name = f"read_pages.{n}x{k}x{'dyn' if pages is None else pages}"
        if name in self.functions:
            return name
        t = "?" if pages is None else str(pages)
        r = "?" if pages is None else str(n * k * pages)
        row = length * d
        cache = f"tensor<?x{k * row}x{self.dtype}>"
        split, flat = f"tensor<?x{k}x{row}x{self.dtype}>", f"tensor<?x{row}x{self.dtype}>"
        read = f"tensor<{r}x{row}x{self.dtype}>"
        result = f"tensor<{n}x{k}x{t}x{length}x{d}x{self.dtype}>"
        size_r = "%r" if pages is None else ""
        self.functions[name] = "\n".join(
            [
                f"  func.func private @{name}(%cache: {cache}, %rows: tensor<{r}xi64>) "
                f"-> {result} {{",
                "    %c0 = arith.constant 0 : index",
                f"    %heads = arith.constant {n * k} : index",
                f"    %p = tensor.dim %cache, %c0 : {cache}",
                f"    %r = tensor.dim %rows, %c0 : tensor<{r}xi64>",
                "    %t = arith.divui %r, %heads : index",
                "    %split = tensor.expand_shape %cache [[0], [1, 2]] output_shape "
                f"[%p, {k}, {row}] : {cache} into {split}",
                f"    %flat = tensor.collapse_shape %split [[0, 1], [2]] : {split} into {flat}",
                f"    %empty = tensor.empty({size_r}) : {read}",
                f"    %read = iree_linalg_ext.gather dimension_map = [0] "
                f"ins(%flat, %rows : {flat}, tensor<{r}xi64>) outs(%empty : {read}) -> {read}",
                f"    %result = tensor.expand_shape %read [[0, 1, 2], [3, 4]] output_shape "
                f"[{n}, {k}, {'%t' if pages is None else pages}, {length}, {d}] : "
                f"{read} into {result}",
                f"    return %result : {result}",
                "  }",
            ]
        )
        return name
