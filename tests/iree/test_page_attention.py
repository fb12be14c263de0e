"""Decode attention that walks the pages, compiled for this CPU, against numpy."""

from __future__ import annotations

from pathlib import Path

import iree.runtime as rt
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from shark_llm.compile.compiler import run_compiler
from shark_llm.compile.targets import get_target
from shark_llm.export.page_attention import PageAttention, is_whole_vectors

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ELEMENTS = {
    "f32": rt.HalElementType.FLOAT_32,
    "f16": rt.HalElementType.FLOAT_16,
    "bf16": rt.HalElementType.BFLOAT_16,
}
KV_HEADS, TABLE_PAGES = 2, 5


@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim", "group"),
    [
        ("bf16", 16, 64, 3),
        ("bf16", 32, 24, 16),  # more query heads than a workgroup takes
        ("f16", 8, 80, 7),
        ("f32", 64, 40, 1),  # two chunks a page
    ],
)
def test_walk_equals_softmax(
    dtype: str, page_size: int, head_dim: int, group: int, tmp_path: Path
) -> None:
    """C04, C05: rows of 1 token, of one page, of all pages and in between, on pages in any order.
    Whatever lies behind a row's last token, here NaN, changes nothing."""
    random = np.random.default_rng(3)
    lengths = np.array([1, page_size, page_size + 1, 3 * page_size - 3, TABLE_PAGES * page_size])
    n = len(lengths)
    q = random.standard_normal((n, 1, KV_HEADS * group, head_dim), dtype=np.float32)
    shape = (n * TABLE_PAGES + 1, KV_HEADS, page_size, head_dim)
    caches = [random.standard_normal(shape).astype(DTYPES[dtype]) for _ in "kv"]
    table = random.permutation(np.arange(1, shape[0])).reshape(n, TABLE_PAGES)
    wanted = [softmax_attention(q[i, 0], caches, table[i], lengths[i]) for i in range(n)]
    for row, length in zip(table, lengths, strict=True):
        for page, beyond in zip(row, length - page_size * np.arange(TABLE_PAGES), strict=True):
            for cache in caches:
                cache[page, :, max(0, beyond) :] = np.nan

    module = compiled(dtype, page_size, head_dim, (n, KV_HEADS * group), tmp_path)
    device = rt.get_device("local-sync")
    views = [
        rt.DeviceArray(
            device,
            device.allocator.allocate_buffer_copy(
                memory_type=rt.MemoryType.DEVICE_LOCAL,
                allowed_usage=rt.BufferUsage.DEFAULT,
                device=device,
                buffer=cache.reshape(shape[0], -1),
                element_type=ELEMENTS[dtype],
            ),
        )
        for cache in caches
    ]
    found = module.attend(q, table, lengths[:, None], *views).to_host()
    assert np.abs(found - np.stack(wanted)).max() < 1e-5


def softmax_attention(
    q: npt.NDArray[np.float32],
    caches: list[npt.NDArray[np.float32]],
    pages: npt.NDArray[np.int64],
    length: int,
) -> npt.NDArray[np.float64]:
    """Of one row: q (A, D) -> (A * D)."""
    # (T, K, L, D) -> (A, length, D)
    keys, values = (
        np.repeat(
            np.concatenate(list(cache[pages].astype(np.float64)), axis=1)[:, :length],
            q.shape[0] // KV_HEADS,
            axis=0,
        )
        for cache in caches
    )
    scores = np.einsum("ad,atd->at", q, keys) * q.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return np.einsum("at,atd->ad", weights, values).reshape(-1)


def compiled(
    dtype: str, page_size: int, head_dim: int, rows_and_heads: tuple[int, int], tmp_path: Path
) -> rt.VmModule:
    """A module with @attend."""
    attention = PageAttention(dtype=dtype, page_size=page_size, head_dim=head_dim)
    n, heads = rows_and_heads
    symbol = attention.function(n, heads, KV_HEADS)
    assert attention.function(n, heads, KV_HEADS) == symbol
    assert len(attention.functions) == 1
    cache = f"tensor<?x{KV_HEADS * page_size * head_dim}x{dtype}>"
    types = f"tensor<{n}x1x{heads}x{head_dim}xf32>, tensor<{n}x?xi64>, tensor<{n}x1xi64>"
    result = f"tensor<{n}x{heads * head_dim}xf32>"
    arguments = ", ".join(f"%a{i}: {t}" for i, t in enumerate([*types.split(", "), cache, cache]))
    wrapper = f"""
func.func @attend({arguments}) -> {result} {{
  %r = func.call @{symbol}(%a0, %a1, %a2, %a3, %a4) : ({types}, {cache}, {cache}) -> {result}
  return %r : {result}
}}"""
    source, output = tmp_path / "attention.mlir", tmp_path / "attention.vmfb"
    source.write_text("\n".join(["module @m {", attention.functions[symbol], wrapper, "}"]))
    run_compiler(source, output, get_target("host").compile_flags(1))
    config = rt.Config("local-sync")
    return rt.load_vm_module(rt.VmModule.mmap(config.vm_instance, str(output)), config)


def test_pages_or_heads_of_broken_vectors_are_not_walked() -> None:
    """Pages of 2 or 4 tokens, heads of 4 or 20 columns: they are gathered."""
    assert is_whole_vectors(8, 24)
    assert not is_whole_vectors(4, 64)
    assert not is_whole_vectors(16, 20)
