"""Weights as whole numbers of 8 bits with a scale for each row: w[n, k] = scale[n] * q[n, k].

Symmetric, so that a product needs no correction for a zero point, and per output channel, so that
its result is scaled once for each column: (x @ w.T)[m, n] = scale[n] * (x @ q.T)[m, n]. The largest
|w| of a row becomes 127, -128 is not used, and no weight is further from its own than half a scale.

Every matrix of the model is quantized, the embedding too: its rows are looked up one at a time, and
where it is tied they are the output channels of the head. Norms and biases are not.

Legend: N output channels (rows), K columns.
"""

from __future__ import annotations

import torch

LARGEST = 127


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) of any float dtype -> q (N, K) i8 and scale (N) f32. A row of zeros has the scale 1.

    The rows must be finite.
    """
    wide = rows.to(torch.float32)
    scale = wide.abs().amax(1) / LARGEST  # (N)
    # A row whose scale is too small for an f32 is a row of zeros too.
    scale = torch.where(scale > 0, scale, 1.0)
    q = torch.round(wide / scale[:, None]).clamp(-LARGEST, LARGEST)
    return q.to(torch.int8), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q (N, K) i8 and scale (N) f32 -> (N, K) f32."""
    return q.to(torch.float32) * scale[:, None]
