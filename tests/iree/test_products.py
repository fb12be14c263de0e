"""Products with weights, compiled for this CPU, against numpy.

One module holds every function, so that the compiler starts once for each dtype and form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import iree.runtime as rt
import ml_dtypes
import numpy as np
import pytest

from shark_llm.compile.compiler import run_compiler
from shark_llm.compile.targets import get_target
from shark_llm.export.linear import LinearLibrary
from shark_llm.export.packed import LinearForm

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
K = 24
# Of one row 6, 5, 4 or 2 tiles of 16 side by side, or not (7 tiles, one); the last are not filled.
CASES = [(1, n, False) for n in (96, 80, 64, 32, 112, 16, 40, 7)]
CASES += [(m, n, False) for m in (2, 3, 4, 8, 9, None) for n in (32, 40)]
CASES += [(m, 80, True) for m in (1, 8, None)]
CASES += [(m, 40, False) for m in (6, 7)]  # one tile, and two that are not filled


def wrapper(i: int, symbol: str, rows: int, n: int, dtype: str, given: tuple[str, ...]) -> str:
    """@case{i}: calls a product with f32 arguments, which it narrows. `given`: rows of the type,
    and the shapes of the operands."""
    held, *shapes = given
    wide = [f"tensor<{shape}xf32>" for shape in shapes]
    narrow = [f"tensor<{shape}x{dtype}>" for shape in shapes]
    arguments = "".join(f", %a{j}: {t}" for j, t in enumerate(wide))
    lines = [
        f"func.func @case{i}(%x: tensor<{rows}x{K}xf32>{arguments}) -> tensor<{rows}x{n}xf32> {{",
        f"  %held = tensor.cast %x : tensor<{rows}x{K}xf32> to tensor<{held}x{K}xf32>",
    ]
    for j, (before, after) in enumerate(zip(wide, narrow, strict=True)):
        cast = "arith.truncf" if before != after else "tensor.cast"
        lines.append(f"  %n{j} = {cast} %a{j} : {before} to {after}")
    passed = "".join(f", %n{j}" for j in range(len(shapes)))
    return "\n".join(
        [
            *lines,
            f"  %y = func.call @{symbol}(%held{passed}) : "
            f"(tensor<{held}x{K}xf32>, {', '.join(narrow)}) -> tensor<{held}x{n}xf32>",
            f"  %result = tensor.cast %y : tensor<{held}x{n}xf32> to tensor<{rows}x{n}xf32>",
            f"  return %result : tensor<{rows}x{n}xf32>",
            "}",
        ]
    )


@pytest.mark.parametrize(
    ("dtype", "form"),
    [("f32", "packed"), ("f16", "packed"), ("bf16", "packed"), ("bf16", "plain")],
)
def test_products_equal_numpy(dtype: str, form: Literal["packed", "plain"], tmp_path: Path) -> None:
    """C01, C05: every number of rows and of tiles, filled or not, with a bias and without."""
    library = LinearLibrary(form=LinearForm(form=form), dtype=dtype)
    wrappers = []
    for i, (m, n, bias) in enumerate(CASES):
        symbol = library.function(m, K, n, bias=bias)
        held, rows = ("?", 13) if m is None else (str(m), m)
        shapes = (f"{n}x{K}", *[str(n)] * bias)
        wrappers.append(wrapper(i, symbol, rows, n, dtype, (held, *shapes)))
    source, output = tmp_path / "products.mlir", tmp_path / "products.vmfb"
    source.write_text("\n".join(["module @m {", *library.functions.values(), *wrappers, "}"]))
    run_compiler(source, output, get_target("host").compile_flags(1))
    config = rt.Config("local-sync")
    module = rt.load_vm_module(rt.VmModule.mmap(config.vm_instance, str(output)), config)
    random = np.random.default_rng(1)
    for i, (m, n, bias) in enumerate(CASES):
        x = random.standard_normal((13 if m is None else m, K), dtype=np.float32)
        operands = [random.standard_normal((n, K), dtype=np.float32)]
        operands += [random.standard_normal(n, dtype=np.float32)] * bias
        operands = [o.astype(DTYPES[dtype]).astype(np.float32) for o in operands]
        # The plain form narrows the activations too.
        read = x.astype(DTYPES[dtype]) if form == "plain" else x
        wanted = read.astype(np.float64) @ operands[0].astype(np.float64).T
        wanted = wanted + operands[1] if bias else wanted
        found = module[f"case{i}"](x, *operands).to_host()
        assert np.abs(found - wanted).max() < 2e-5, (m, n, bias)
