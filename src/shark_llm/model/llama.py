"""Llama as fragments of ONE rank: prepare, embed, norm, attend, gate, last_rows. Products with
weights stand between them.

Every function takes plain tensors and knows only its own local shapes. A transformer block is

    x = norm(hidden);  q, k, v = linear(x) three times;  a = attend(q, k, v);   hidden += linear(a)
    x = norm(hidden);  g, u    = linear(x) twice;        m = gate(g, u);        hidden += linear(m)

where `linear` is written by whoever composes the block: torch in `eager.py`, products in the form
of the target in `export/linear.py`. What several ranks compute in parts (the products that end
each half of the block, and `embed`) is added up by `add_partials`, in rank order.

Hidden states, norms, rotation and softmax are f32, whatever the weights' dtype.

Legend: N batch rows, S tokens of a row in this step, M = N * S, T pages of a row's table, L page
size, H hidden size, A local query heads, K local kv heads, G = A / K, D head_dim, F = D / 2,
I local MLP columns, V local vocabulary rows, P pages of the pool.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from shark_llm.model.config import ModelConfig
from shark_llm.model.kv_cache import (
    head_rows,
    read_rows,
    write_last_token,
    write_pages,
    write_token,
)
from shark_llm.model.rope import attention_scaling, cos_sin, rotate, turn_fractions

LARGEST_ROUNDED = 127
ROUNDING_GROUPS = (32, 16)
LEAST_PEAK = 1e-30
"""A group of which no magnitude is larger becomes zeros: its steps would leave the range of f32."""
SUM_LANES = 8
"""Sums that `softmax_sums` keeps side by side."""

Phase = Literal["prefill", "decode"]
AttentionForm = Literal["matmul", "fused"]


class Step(NamedTuple):
    """What `prepare` computes once per step and rank, for all layers."""

    cos: torch.Tensor  # (N, S, F) f32
    sin: torch.Tensor  # (N, S, F) f32
    mask: torch.Tensor  # (N, S, T*L) bool: query may see key
    visible: torch.Tensor  # (N, S) i64: how many keys a query may see, from the first
    write_pages: torch.Tensor  # prefill (N, S/L), decode (N, 1) i64
    write_offsets: torch.Tensor  # (N) i64, place in the page (used by decode)
    read_pages: torch.Tensor  # (N, T) i64, pages that hold what the row may see


def prepare(
    config: ModelConfig,
    page_size: int,
    tokens: torch.Tensor,
    start_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> Step:
    """Angles, mask and places to write.

    tokens (N, S), start_positions (N), seq_lens (N), page_table (N, T), all i64. Tokens at or
    beyond a row's seq_len are padding: pages that hold nothing else are redirected to page 0, the
    scratch page.
    """
    s = tokens.shape[1]
    t = page_table.shape[1]
    positions = start_positions[:, None] + torch.arange(s)  # (N, S)
    cos, sin = cos_sin(
        positions, turn_fractions(config.rope, config.head_dim), attention_scaling(config.rope)
    )
    key_positions = torch.arange(t * page_size)  # (T*L)
    visible = torch.minimum(positions + 1, seq_lens[:, None])  # (N, S): keys 0 .. visible-1
    # A padding query sees what the last real one sees: finite numbers that nobody reads.
    mask = key_positions < visible[..., None]  # (N, S, T*L)
    first = positions.view(positions.shape[0], -1, page_size)[:, :, 0] if s > 1 else positions
    index = torch.div(first, page_size, rounding_mode="floor")  # (N, S/L) or (N, 1)
    held = torch.gather(page_table, 1, torch.clamp(index, max=t - 1))
    pages = torch.where(first < seq_lens[:, None], held, 0)
    # Pages past the row's end may hold anything, NaN included. Their weight is 0, but 0 * NaN is
    # NaN: the row's first page is read in their place.
    starts = torch.arange(t)[None, :] * page_size
    readable = torch.where(starts < seq_lens[:, None], page_table, page_table[:, :1])
    offsets = torch.remainder(start_positions, page_size)
    return Step(cos, sin, mask, visible, pages, offsets, readable)


def embed(
    tokens: torch.Tensor,
    first_row: torch.Tensor,
    table: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's share of the embeddings: tokens (N, S), table (V, H) -> (M, H) f32.

    `first_row` (i64 scalar tensor) is the token id of the table's first row; ids of other ranks
    give zeros, so the sum over ranks is the lookup in the whole table. `scale` (V) f32 is that of a
    quantized table's rows.
    """
    local = tokens.reshape(-1) - first_row  # (M)
    own = torch.logical_and(local >= 0, local < table.shape[0])
    held = torch.where(own, local, 0)
    rows = torch.nn.functional.embedding(held, table).to(torch.float32)
    if scale is not None:
        rows = rows * scale.index_select(0, held)[:, None]
    return torch.where(own[:, None], rows, 0.0)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm: x (M, H) f32, weight (H) -> (M, H) f32. Source: LlamaRMSNorm."""
    variance = (x * x).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + eps) * weight.to(torch.float32)


def attend(
    config: ModelConfig,
    page_size: int,
    phase: Phase,
    form: AttentionForm,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: Step,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate, write to the cache, attend to all that the row's pages hold.

    q (M, A*D), k and v (M, K*D), all f32 -> (M, A*D) f32 and both caches.
    """
    n, heads = step.read_pages.shape[0], k.shape[1] // config.head_dim

    def read(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return read_rows(cache, head_rows(pages, heads), n, heads, page_size)

    held = read(v_cache, step.write_pages) if phase == "decode" else None
    q, k_cache, v_cache = write(config, page_size, phase, q, k, v, step, k_cache, v_cache, held)
    keys, values = read(k_cache, step.read_pages), read(v_cache, step.read_pages)
    return mix(form, q, keys, values, step.mask), k_cache, v_cache


def write(
    config: ModelConfig,
    page_size: int,
    phase: Phase,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: Step,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    held: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first part of `attend`: rotate, write to the cache.

    Prefill writes whole pages. With `held`, what the pages to write hold of v, (N, K, 1, L, D),
    decode zeroes what follows the token, so that no value that `step.read_pages` reaches is one
    nobody wrote: `mix` asks for that, attention by `step.visible` does not. Returns the rotated q
    (N, S, A, D) f32 and both caches.
    """
    n, d = step.read_pages.shape[0], config.head_dim
    q = q.view(n, -1, q.shape[1] // d, d)  # (N, S, A, D)
    k = k.view(n, -1, k.shape[1] // d, d)  # (N, S, K, D)
    v = v.view(n, -1, v.shape[1] // d, d)
    cos, sin = step.cos[:, :, None, :], step.sin[:, :, None, :]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if phase == "prefill":
        k_cache = write_pages(k_cache, step.write_pages, k, page_size)
        v_cache = write_pages(v_cache, step.write_pages, v, page_size)
    else:
        place = (step.write_pages[:, 0], step.write_offsets)
        k_cache = write_token(k_cache, *place, k[:, 0], page_size)
        if held is None:
            v_cache = write_token(v_cache, *place, v[:, 0], page_size)
        else:
            v_cache = write_last_token(v_cache, *place, v[:, 0], held)
    return q, k_cache, v_cache


def mix(
    form: AttentionForm,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """The second part of `attend`: softmax(q k^T / sqrt(D)) v.

    q (N, S, A, D) f32, keys and values (N, K, T, L, D), mask (N, S, T*L) -> (M, A*D) f32. Masked
    keys may be anything, masked values must be finite.
    """
    return (_attend_matmul if form == "matmul" else _attend_fused)(q, keys, values, mask)


def _attend_matmul(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """As plain operations: shapes as in `mix`."""
    n, s, a, d = q.shape
    _, k, t, page, _ = keys.shape
    g = a // k
    q = q.view(n, s, k, g, d).permute(0, 2, 1, 3, 4).reshape(n * k, s * g, d)  # (N*K, S*G, D)
    keys = keys.reshape(n * k, t * page, d)
    # Transpose before widening: so the compiler folds the widening into the product.
    scores = torch.bmm(q, keys.transpose(1, 2).to(torch.float32)).view(n, k, s, g, t * page)
    scores = torch.where(mask[:, None, :, None, :], scores * d**-0.5, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp()  # every query sees at least one key: peak is finite
    total = weights.sum(-1, keepdim=True)
    values = values.reshape(n * k, t * page, d).to(torch.float32)
    mixed = torch.bmm(weights.view(n * k, s * g, t * page), values)
    mixed = mixed.view(n, k, s, g, d) / total
    return mixed.permute(0, 2, 1, 3, 4).reshape(n * s, a * d)


def _attend_fused(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Through scaled_dot_product_attention, which GPU targets have a tuned kernel for."""
    n, s, a, d = q.shape
    _, k, t, page, _ = keys.shape
    # Kernels may add the mask to the scores as 0 and -inf, and NaN - inf is NaN: here the masked
    # keys must be finite too.
    seen = mask.any(1).view(n, 1, t, page, 1)
    keys = torch.where(seen, keys, 0).reshape(n, k, t * page, d)
    values = values.reshape(n, k, t * page, d)
    q = (q * d**-0.5).transpose(1, 2).to(keys.dtype)
    mixed: torch.Tensor = fused_attention(q, keys, values, mask[:, None])  # (N, A, S, D)
    return mixed.transpose(1, 2).reshape(n * s, a * d).to(torch.float32)


@torch.library.custom_op("shark_llm::attention", mutates_args=())
def fused_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """scaled_dot_product_attention as one operation that tracing does not take apart.

    q (N, A, S, D), already scaled, keys and values (N, K, T*L, D), mask (N, 1, S, T*L) bool.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, mask, scale=1.0, enable_gqa=True
    )


@fused_attention.register_fake
def _(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(q)


def gate(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """silu(g) * u: all (M, I) f32. Source: LlamaMLP."""
    return torch.nn.functional.silu(g) * u


def rounding_group(columns: int) -> int | None:
    """How many columns of a row share a step where rows are rounded to whole numbers: the first of
    `ROUNDING_GROUPS` that divides them; None where there is none."""
    return next((size for size in ROUNDING_GROUPS if columns % size == 0), None)


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """x (M, K) f32, each group of a row rounded to 255 steps, the largest of which is its largest
    magnitude. Rows that cannot be cut into groups are left as they are. A group with a value that
    is not finite has none that is."""
    group = rounding_group(x.shape[1])
    if group is None:
        return x
    groups = x.reshape(x.shape[0], -1, group)
    peak = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(peak < LEAST_PEAK, 0.0, LARGEST_ROUNDED / peak)
    whole = torch.round(groups * inverse).clamp(-LARGEST_ROUNDED, LARGEST_ROUNDED)
    return (whole * (peak / LARGEST_ROUNDED)).reshape(x.shape)


def last_rows(
    hidden: torch.Tensor, start_positions: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """The hidden states of each row's last valid token: (M, H), (N), (N) -> (N, H) f32."""
    n = seq_lens.shape[0]
    s = hidden.shape[0] // n
    last = torch.clamp(seq_lens - start_positions - 1, 0, s - 1)  # (N)
    return hidden.index_select(0, torch.arange(n) * s + last)


def best(logits: torch.Tensor) -> torch.Tensor:
    """The lowest token of the highest logit: (N, V) f32 -> (N,) i64; V where that is not finite.

    As two plain reductions, which every backend spreads over its lanes; an argmax it may not. NaN
    anywhere in a row makes the highest logit NaN, which equals nothing.
    """
    vocab_size = logits.shape[1]
    highest = logits.amax(1, keepdim=True)
    is_best = (logits == highest) & (highest.abs() < float("inf"))
    tokens = torch.arange(vocab_size, dtype=torch.int32)
    none = torch.full((), vocab_size, dtype=torch.int32)
    return torch.where(is_best, tokens, none).amin(1).to(torch.int64)


def softmax_sums(
    block: int, logits: torch.Tensor, best: torch.Tensor, inverse_temperatures: torch.Tensor
) -> torch.Tensor:
    """Of every `block` logits the sum of exp((logit - the row's best) / temperature).

    logits (N, V) f32, `best` tokens (N,) i64, (N,) f32 -> (N, ceil(V / block)) f32. Of a row that
    has no best token they mean nothing.
    """
    n, vocab_size = logits.shape
    token = torch.clamp(best, max=vocab_size - 1)
    peaks = logits.gather(1, token[:, None])
    blocks = -(-vocab_size // block)
    padding = blocks * block - vocab_size
    if padding:
        logits = torch.nn.functional.pad(logits, (0, padding), value=float("-inf"))
    # The lanes of a vector are added up last: across them is where a sum is slow.
    lanes = logits.reshape(n, blocks, block // SUM_LANES, SUM_LANES)
    peaks, scale = peaks[:, :, None, None], inverse_temperatures[:, None, None, None]
    return torch.exp((lanes - peaks) * scale).sum(2).sum(2)


def add_partials(hidden: torch.Tensor, *partials: torch.Tensor) -> torch.Tensor:
    """The residual stream plus what every rank contributes, all (M, H) f32.

    Added in rank order: the sum is the same whoever finishes first.
    """
    for partial in partials:
        hidden = hidden + partial
    return hidden
