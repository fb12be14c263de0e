"""Products as vector code: how they are cut. tests/iree/test_products.py says what they compute."""

from __future__ import annotations

import re

import pytest

from shark_llm.export.row_products import product_function
from shark_llm.export.whole_products import STEP, whole_product_function


@pytest.mark.parametrize(
    ("m", "k", "n", "workgroups"),
    [
        (8, 576, 49152, 64),
        (8, 576, 192, 12),
        (8, 576, 32, 2),
        (8, 576, 16 * 1021, 1021),  # a prime number of panels
        (None, 576, 1536, 8),
        (None, 4096, 14336, 448),  # two panels fill the cache
        (None, 14336, 4096, 256),  # one does not fit
    ],
)
def test_every_core_has_a_part(m: int | None, k: int, n: int, workgroups: int) -> None:
    text = product_function("product", m, k, n, "bf16", scaled=False)
    assert re.findall(r"%groups = arith.constant (\d+)", text) == [str(workgroups)]


@pytest.mark.parametrize(
    ("m", "k", "n", "streams", "workgroups"),
    [
        (1, 576, 49152, 6, 64),
        (1, 576, 1536, 6, 16),
        (1, 576, 192, 6, 2),
        (1, 576, 16 * 1021, 1, 1021),  # a prime number of panels
        (2, 576, 1536, 3, 32),
        (4, 576, 1536, 1, 48),
        (None, 576, 1536, 1, 8),
    ],
)
def test_few_rows_read_several_panels_at_once(
    m: int | None, k: int, n: int, streams: int, workgroups: int
) -> None:
    """Of whole numbers: as many as there are registers for."""
    text = whole_product_function("product", m, k, n)
    assert re.findall(r"%groups = arith.constant (\d+)", text) == [str(workgroups)]
    multiplied = text.count("llvm.call_intrinsic")
    rows = 6 if m is None else m
    assert multiplied == rows * 2 * streams * STEP
