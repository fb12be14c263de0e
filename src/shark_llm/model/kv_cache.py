"""The paged KV cache of one layer on one rank, as tensors: where tokens are written and read.

A cache is a table of pages; a page holds L tokens of every local kv head, head by head, so that one
page is one contiguous row, and so is one head of it. Keys and values have a cache each, in the same
layout.

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
    """Write one token a row; the rest of its page stays as it is.

    cache (P, K*L*D), pages and offsets (N) i64, values (N, K, D) -> cache.
    """
    n, k, d = values.shape
    # Rows of the cache seen as (P*K, L, D), computed from `pages`: an index that is constant by
    # itself is hoisted without a device when there are several, and costs a copy of the cache.
    rows = (pages[:, None] * k + torch.arange(k)[None, :]).reshape(-1)  # (N*K)
    slots = offsets[:, None].expand(n, k).reshape(-1)  # (N*K)
    view = cache.view(-1, page_size, d)  # (P*K, L, D)
    tokens = values.reshape(n * k, d).to(cache.dtype)
    return view.index_put((rows, slots), tokens).view(cache.shape)


def write_last_token(
    cache: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    held: torch.Tensor,
) -> torch.Tensor:
    """Write one token a row and zero all that follows it in its page, whatever was there.

    cache (P, K*L*D), pages and offsets (N) i64, values (N, K, D), held (N, K, 1, L, D): what the
    pages hold now -> cache.
    """
    n, k, _, page_size, d = held.shape
    slots = torch.arange(page_size)[None, None, :, None]  # (1, 1, L, 1)
    offset = offsets[:, None, None, None]
    fresh = torch.where(slots == offset, values[:, :, None, :].to(cache.dtype), 0)
    page = torch.where(slots < offset, held[:, :, 0], fresh)  # (N, K, L, D)
    return cache.index_put((pages,), page.reshape(n, k * page_size * d))


def head_rows(pages: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Where the pages' heads lie in the cache seen as (P*K, L*D): (N, T) i64 -> (N*K*T) i64."""
    heads = torch.arange(num_kv_heads)[None, :, None]
    return (pages[:, None, :] * num_kv_heads + heads).reshape(-1)


def read_rows(
    cache: torch.Tensor, rows: torch.Tensor, batch_size: int, num_kv_heads: int, page_size: int
) -> torch.Tensor:
    """Pages head by head: cache (P, K*L*D), rows (N*K*T) of `head_rows` -> (N, K, T, L, D).

    Modules read through `export/pages.py`, which copies whole rows, or copy nothing.
    """
    row = cache.view(cache.shape[0] * num_kv_heads, -1).index_select(0, rows)  # (N*K*T, L*D)
    return row.view(batch_size, num_kv_heads, -1, page_size, row.shape[1] // page_size)
