"""The paged KV cache of one layer on one rank, as tensors: where tokens are written, how they are read.

A cache is a table of pages; a page holds PAGE tokens of every local kv head, head by head, so that one
page is one contiguous row. Keys and values have a cache each, in the same layout.

Legend: P pages of the pool, N batch rows, T pages of a row's table, K local kv heads, L page size,
D head_dim, S tokens of this step (a multiple of L in prefill, 1 in decode).
"""

from __future__ import annotations

import torch


def page_elements(num_kv_heads: int, page_size: int, head_dim: int) -> int:
    """Elements of one page of one layer: the cache is (P, K * L * D)."""
    return num_kv_heads * page_size * head_dim


def write_pages(
    cache: torch.Tensor, pages: torch.Tensor, values: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Overwrite whole pages: cache (P, K*L*D), pages (N, S/L) i64, values (N, S, K, D) -> cache."""
    n, s, k, d = values.shape
    rows = values.reshape(n, s // page_size, page_size, k, d)
    rows = rows.transpose(2, 3).reshape(-1, k * page_size * d)  # (N*S/L, K*L*D)
    return cache.index_put((pages.reshape(-1),), rows.to(cache.dtype))


def write_token(
    cache: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Write one token a row: cache (P, K*L*D), pages and offsets (N) i64, values (N, K, D) -> cache."""
    n, k, d = values.shape
    heads = torch.arange(k)[None, :].expand(n, k)  # (N, K)
    view = cache.view(-1, k, page_size, d)  # (P, K, L, D)
    index = (pages[:, None].expand(n, k), heads, offsets[:, None].expand(n, k))
    return view.index_put(index, values.to(cache.dtype)).view(cache.shape)


def read_pages(
    cache: torch.Tensor, page_table: torch.Tensor, num_kv_heads: int, page_size: int
) -> torch.Tensor:
    """All tokens of every row's pages: cache (P, K*L*D), page_table (N, T) i64 -> (N, T, K, L, D)."""
    n, t = page_table.shape
    rows = cache.index_select(0, page_table.reshape(-1))  # (N*T, K*L*D)
    return rows.view(n, t, num_kv_heads, page_size, -1)
