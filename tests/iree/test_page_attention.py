"""Attention that walks the pages, compiled for this CPU, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import iree.runtime as rt
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from shark_llm.compile.compiler import run_compiler
from shark_llm.compile.targets import get_target
from shark_llm.export.page_attention import PageAttention, walks_pages
from shark_llm.export.prefill_attention import PrefillAttention

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
ELEMENTS = {
    np.dtype(np.float32): rt.HalElementType.FLOAT_32,
    np.dtype(np.float16): rt.HalElementType.FLOAT_16,
    np.dtype(ml_dtypes.bfloat16): rt.HalElementType.BFLOAT_16,
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

    attention = PageAttention(dtype=dtype, page_size=page_size, head_dim=head_dim)
    module = compiled(attention, "1", (n, KV_HEADS * group), tmp_path)
    found = module.attend(q, table, lengths[:, None], *on_device(caches)).to_host()
    assert np.abs(found - np.stack(wanted)).max() < 1e-5


@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim", "group"),
    [
        ("bf16", 16, 64, 3),
        ("bf16", 32, 24, 16),  # more query heads than a workgroup takes
        ("f16", 8, 80, 7),
        ("f32", 128, 40, 1),  # two chunks a page
        ("bf16", 16, 512, 2),  # the largest buffer
    ],
)
def test_prefill_equals_softmax(
    dtype: str, page_size: int, head_dim: int, group: int, tmp_path: Path
) -> None:
    """C04, C05: a prompt from its start, one that goes on behind cached pages, one that ends
    in a page and is followed by pages of padding. What no query may see, here NaN, changes nothing,
    and padding gives finite numbers."""
    random = np.random.default_rng(3)
    pages, heads = 2 + 160 // page_size, KV_HEADS * group
    s = (pages - 1) * page_size
    starts = np.array([0, page_size, 0])
    lengths = np.array([s, page_size + s, s - page_size - 3])
    q = random.standard_normal((3, s, heads, head_dim), dtype=np.float32)
    shape = (3 * pages + 1, KV_HEADS, page_size, head_dim)
    caches = [random.standard_normal(shape).astype(DTYPES[dtype]) for _ in "kv"]
    table = random.permutation(np.arange(1, shape[0])).reshape(3, pages)
    visible = np.minimum(starts[:, None] + np.arange(s) + 1, lengths[:, None])
    wanted = np.zeros((3, s, heads * head_dim))
    for row, place in np.ndindex(3, s):
        wanted[row, place] = softmax_attention(
            q[row, place], caches, table[row], visible[row, place]
        )
    for row, length in zip(table, lengths, strict=True):
        for page, beyond in zip(row, length - page_size * np.arange(pages), strict=True):
            for cache in caches:
                cache[page, :, max(0, beyond) :] = np.nan

    attention = PrefillAttention(dtype=dtype, page_size=page_size, head_dim=head_dim)
    module = compiled(attention, "?", (3, heads), tmp_path)
    result = module.attend(q, table, visible, *on_device(caches))
    found = result.to_host().reshape(wanted.shape)  # a view of the result's memory
    assert np.isfinite(found).all()
    for row, count in enumerate(np.minimum(s, lengths - starts)):
        assert np.abs(found[row, :count] - wanted[row, :count]).max() < 1e-5


def on_device(caches: list[npt.NDArray[Any]]) -> list[rt.DeviceArray]:
    """As (P, K*L*D)."""
    device = rt.get_device("local-task")
    return [
        rt.DeviceArray(
            device,
            device.allocator.allocate_buffer_copy(
                memory_type=rt.MemoryType.DEVICE_LOCAL,
                allowed_usage=rt.BufferUsage.DEFAULT,
                device=device,
                buffer=cache.reshape(len(cache), -1),
                element_type=ELEMENTS[cache.dtype],
            ),
        )
        for cache in caches
    ]


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
    attention: PageAttention | PrefillAttention,
    tokens: str,
    rows_and_heads: tuple[int, int],
    tmp_path: Path,
) -> rt.VmModule:
    """A module with @attend, of 1 or ? tokens a row."""
    n, heads = rows_and_heads
    page_size, head_dim = attention.page_size, attention.head_dim
    symbol = attention.function(n, heads, KV_HEADS)
    assert attention.function(n, heads, KV_HEADS) == symbol
    assert len(attention.functions) == 1
    cache = f"tensor<?x{KV_HEADS * page_size * head_dim}x{attention.dtype}>"
    q, visible = f"tensor<{n}x{tokens}x{heads}x{head_dim}xf32>", f"tensor<{n}x{tokens}xi64>"
    types = [q, f"tensor<{n}x?xi64>", visible, cache, cache]
    result = f"tensor<{n if tokens == '1' else '?'}x{heads * head_dim}xf32>"
    arguments = ", ".join(f"%a{i}: {t}" for i, t in enumerate(types))
    wrapper = f"""
func.func @attend({arguments}) -> {result} {{
  %r = func.call @{symbol}(%a0, %a1, %a2, %a3, %a4) : ({", ".join(types)}) -> {result}
  return %r : {result}
}}"""
    source, output = tmp_path / "attention.mlir", tmp_path / "attention.vmfb"
    source.write_text("\n".join(["module @m {", attention.functions[symbol], wrapper, "}"]))
    run_compiler(source, output, get_target("host").compile_flags(1))
    config = rt.Config("local-task")
    return rt.load_vm_module(rt.VmModule.mmap(config.vm_instance, str(output)), config)


def test_pages_or_heads_of_broken_vectors_are_not_walked() -> None:
    """Pages of 2 or 4 tokens, heads of 4, 20 or 520 columns: they are gathered."""
    assert walks_pages(8, 24)
    assert not walks_pages(4, 64)
    assert not walks_pages(16, 20)
    assert walks_pages(16, 512)
    assert not walks_pages(16, 520)
