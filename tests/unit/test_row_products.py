"""Products as vector code: how they are cut. tests/iree/test_products.py says what they compute."""

from __future__ import annotations

import re

import pytest

from shark_llm.export.row_products import product_function


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
