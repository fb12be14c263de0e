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
import torch

from shark_llm.compile.compiler import run_compiler
from shark_llm.compile.targets import get_target
from shark_llm.export.linear import LinearLibrary
from shark_llm.export.packed import LinearForm
from shark_llm.model import llama

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# Of one row 6, 5, 4 or 2 tiles of 16 side by side, or not (7 tiles, one); the last are not filled.
CASES = [(1, n, False) for n in (96, 80, 64, 32, 112, 16, 40, 7)]
CASES += [(m, n, False) for m in (2, 3, 4, 8, 9) for n in (32, 40)]
CASES += [(m, 80, True) for m in (1, 8)]
CASES += [(m, 40, False) for m in (6, 7, 17, 39)]  # one tile, two, three, and a loop of seven


DYNAMIC = [(13, 32, False), (13, 40, False), (13, 80, True)]
# Rows that a kernel deals out: one part, two, the last of which is longer, and three.
DYNAMIC += [(100, 40, False), (250, 32, False), (288, 40, True)]


def wrapper(
    i: int, symbol: str, rows: int, k: int, n: int, held: str, given: list[tuple[str, str]]
) -> str:
    """@case{i}: calls a product with f32 arguments, which it narrows. `held`: rows of its type;
    `given`: shape and dtype of each operand."""
    wide = [f"tensor<{shape}xf32>" for shape, _ in given]
    narrow = [f"tensor<{shape}x{dtype}>" for shape, dtype in given]
    arguments = "".join(f", %a{j}: {t}" for j, t in enumerate(wide))
    lines = [
        f"func.func @case{i}(%x: tensor<{rows}x{k}xf32>{arguments}) -> tensor<{rows}x{n}xf32> {{",
        f"  %held = tensor.cast %x : tensor<{rows}x{k}xf32> to tensor<{held}x{k}xf32>",
    ]
    for j, (before, after) in enumerate(zip(wide, narrow, strict=True)):
        narrowing = "arith.fptosi" if after.endswith("xi8>") else "arith.truncf"
        cast = narrowing if before != after else "tensor.cast"
        lines.append(f"  %n{j} = {cast} %a{j} : {before} to {after}")
    passed = "".join(f", %n{j}" for j in range(len(given)))
    return "\n".join(
        [
            *lines,
            f"  %y = func.call @{symbol}(%held{passed}) : "
            f"(tensor<{held}x{k}xf32>, {', '.join(narrow)}) -> tensor<{held}x{n}xf32>",
            f"  %result = tensor.cast %y : tensor<{held}x{n}xf32> to tensor<{rows}x{n}xf32>",
            f"  return %result : tensor<{rows}x{n}xf32>",
            "}",
        ]
    )


@pytest.mark.parametrize(
    ("dtype", "form", "quantized", "min_rows", "k"),
    [
        ("f32", "packed", False, 1, 24),
        ("f32", "packed", False, 8, 24),
        ("f16", "packed", False, 1, 24),
        ("f16", "packed", False, 8, 25),
        ("bf16", "packed", False, 1, 24),
        ("bf16", "packed", False, 8, 24),
        ("bf16", "plain", False, 1, 24),
        ("bf16", "packed", True, 1, 24),
        ("bf16", "packed", True, 8, 24),
        ("bf16", "packed", True, 8, 32),
        ("f32", "packed", True, 8, 288),
        ("bf16", "plain", True, 1, 24),
    ],
)
def test_products_equal_numpy(
    dtype: str,
    form: Literal["packed", "plain"],
    quantized: bool,
    min_rows: int,
    k: int,
    tmp_path: Path,
) -> None:
    """C01, C05: every number of rows and of tiles, filled or not, with a bias and without; weights
    of the dtype, or i8 with a scale for each row."""
    library = LinearLibrary(
        form=LinearForm(form=form, by_rows=min_rows > 1),
        dtype=dtype,
        quantized=quantized,
        min_rows=min_rows,
    )
    wrappers = []
    cases = [(rows, str(rows), n, bias) for rows, n, bias in CASES]
    cases += [(rows, "?", n, bias) for rows, n, bias in DYNAMIC]
    for i, (rows, held, n, bias) in enumerate(cases):
        symbol = library.function(None if held == "?" else rows, k, n, bias=bias)
        given = [(f"{n}x{k}", "i8" if quantized else dtype)]
        given += [(str(n), "f32")] * quantized + [(str(n), dtype)] * bias
        wrappers.append(wrapper(i, symbol, rows, k, n, held, given))
    source, output = tmp_path / "products.mlir", tmp_path / "products.vmfb"
    source.write_text("\n".join(["module @m {", *library.functions.values(), *wrappers, "}"]))
    run_compiler(source, output, get_target("host").compile_flags(1))
    config = rt.Config("local-sync")
    module = rt.load_vm_module(rt.VmModule.mmap(config.vm_instance, str(output)), config)
    random = np.random.default_rng(1)
    for i, (rows, held, n, bias) in enumerate(cases):
        x = random.standard_normal((rows, k), dtype=np.float32)
        weight = random.standard_normal((n, k), dtype=np.float32)
        scale = random.random(n, dtype=np.float32) / 127
        if quantized:
            weight = random.integers(-127, 128, (n, k)).astype(np.float32)
        bias_row = random.standard_normal(n, dtype=np.float32)
        weight, bias_row = (o.astype(DTYPES[dtype]).astype(np.float32) for o in (weight, bias_row))
        operands = [weight, *[scale] * quantized, *[bias_row] * bias]
        # The plain form narrows the activations too.
        read = x.astype(DTYPES[dtype]) if form == "plain" else x
        if quantized and min_rows > 1:  # rounded, if there are whole groups
            read = llama.round_rows(torch.from_numpy(x)).numpy()
        wanted = read.astype(np.float64) @ weight.astype(np.float64).T
        wanted = wanted * scale if quantized else wanted
        wanted = wanted + bias_row if bias else wanted
        found = module[f"case{i}"](x, *operands).to_host()
        assert np.abs(found - wanted).max() < 2e-5, (rows, held, n, bias)


def test_rows_that_are_not_finite_stay_so(tmp_path: Path) -> None:
    """C06: rounding to whole numbers hides no NaN, harms no other row, and makes none."""
    library = LinearLibrary(
        form=LinearForm(form="packed", by_rows=True), dtype="f32", quantized=True, min_rows=16
    )
    symbol = library.function(8, 64, 40, bias=False)
    given = [("40x64", "i8"), ("40", "f32")]
    source, output = tmp_path / "products.mlir", tmp_path / "products.vmfb"
    case = wrapper(0, symbol, 8, 64, 40, "8", given)
    source.write_text("\n".join(["module @m {", *library.functions.values(), case, "}"]))
    run_compiler(source, output, get_target("host").compile_flags(1))
    config = rt.Config("local-sync")
    module = rt.load_vm_module(rt.VmModule.mmap(config.vm_instance, str(output)), config)
    random = np.random.default_rng(2)
    x = random.standard_normal((8, 64), dtype=np.float32)
    x[1, 3], x[2, 40], x[3, 63] = np.nan, np.inf, -np.inf
    x[4], x[5] = 0, 1e-38
    weight = random.integers(1, 128, (40, 64)).astype(np.float32)
    found = module["case0"](x, weight, np.ones(40, np.float32)).to_host()
    assert not np.isfinite(found[1:4]).any()
    sound = [0, 4, 5, 6, 7]
    wanted = llama.round_rows(torch.from_numpy(x[sound])).numpy() @ weight.T
    np.testing.assert_allclose(found[sound], wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("by_rows", [False, True])
def test_int8_takes_no_dispatch_more_than_bf16(by_rows: bool, tmp_path: Path) -> None:
    """Scales are multiplied where results are unpacked or gated, in the product of one row, or in a
    kernel: a pass of their own over the logits of 16 rows took a fifth of their product's time.
    Rows are rounded once, however many products take them."""
    counts = []
    for quantized in (False, True):
        form = LinearForm(form="packed", by_rows=by_rows)
        library = LinearLibrary(form=form, dtype="bf16", quantized=quantized, min_rows=16)
        callers, dtype = [], "i8" if quantized else "bf16"
        for i, m in enumerate((1, 4, 16, None)):
            rows = "?" if m is None else m
            x = f"tensor<{rows}x32xf32>"
            gate, down = f"tensor<96x32x{dtype}>", f"tensor<32x96x{dtype}>"
            wide, narrow = "tensor<96xf32>", "tensor<32xf32>"
            linear = (library.function(m, 32, 96, bias=False), [gate, *[wide] * quantized])
            mlp = (
                library.mlp(m, 32, 96, gate_bias=False, up_bias=False, down_bias=False),
                [gate, gate, down, *[wide, wide, narrow] * quantized],
            )
            for j, ((symbol, types), n) in enumerate(((linear, 96), (mlp, 32))):
                given = ", ".join(f"%a{k}: {type_}" for k, type_ in enumerate(types))
                passed = ", ".join(f"%a{k}" for k in range(len(types)))
                y = f"tensor<{rows}x{n}xf32>"
                callers += [
                    f"func.func @caller{i}_{j}(%x: {x}, {given}) -> {y} {{",
                    f"  %y = func.call @{symbol}(%x, {passed}) : ({x}, {', '.join(types)}) -> {y}",
                    f"  return %y : {y}",
                    "}",
                ]
        source, flow = tmp_path / "products.mlir", tmp_path / "flow.mlir"
        source.write_text("\n".join(["module @m {", *library.functions.values(), *callers, "}"]))
        run_compiler(source, flow, (*get_target("host").compile_flags(1), "--compile-to=flow"))
        text = flow.read_text()
        roundings = text.count("= flow.dispatch @rounded.")
        # Of each number of rows: what the product takes, and what the three of the MLP take.
        assert roundings == (4 * 3 if quantized and by_rows else 0)
        counts.append(text.count("= flow.dispatch @") - roundings)
    assert counts[0] >= counts[1] > 0
