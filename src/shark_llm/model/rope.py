"""Rotary position embedding: inverse frequencies, and angles that stay exact at any position.

Inverse frequencies follow Hugging Face's `modeling_rope_utils` (`_compute_*_parameters`), in f64.
Sources: RoPE arXiv:2104.09864, linear arXiv:2306.15595, YaRN arXiv:2309.00071, llama3 from the
reference code of Llama 3.1.

Legend: F = head_dim / 2 frequencies.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from shark_llm.model.config import RopeConfig

TURN_BITS = 40
"""An angle is kept as a fraction of a turn in fixed point with this many bits.

position * fraction < 2^22 * 2^40 fits an i64 with room to spare, wraps exactly (a whole turn is no
rotation), and its error at position 2^17 is below 1e-6 rad. The same product in f32 is off by 8e-3.
"""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float64]:
    """Radians per position of each pair: (F,) f64."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.theta**-exponents
    match rope.rope_type:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain, head_dim)


def attention_scaling(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by (1 for all types but yarn)."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0


def _llama3(rope: RopeConfig, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    assert rope.original_max_position_embeddings is not None
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    low_wavelength = context / rope.low_freq_factor
    high_wavelength = context / rope.high_freq_factor
    smooth = (context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = np.where(wavelength > low_wavelength, plain / rope.factor, plain)
    is_between = (wavelength <= low_wavelength) & (wavelength >= high_wavelength)
    return np.where(is_between, between, scaled)


def _yarn(
    rope: RopeConfig, plain: npt.NDArray[np.float64], head_dim: int
) -> npt.NDArray[np.float64]:
    assert rope.original_max_position_embeddings is not None
    context = rope.original_max_position_embeddings

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(context / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def turn_fractions(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Turns per position in fixed point with TURN_BITS fractional bits: (F,) i64."""
    turns = inverse_frequencies(rope, head_dim) / (2 * math.pi)
    # f64 has 53 bits: enough for a fraction below 1/6 turn scaled by 2^40.
    return torch.from_numpy(np.rint(turns * 2.0**TURN_BITS).astype(np.int64))


def cos_sin(
    positions: torch.Tensor, fractions: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position's angles: positions (...) i64 -> two of (..., F) f32."""
    turns = positions[..., None] * fractions  # (..., F) i64
    half = 1 << (TURN_BITS - 1)
    wrapped = torch.bitwise_and(turns + half, (1 << TURN_BITS) - 1) - half  # in [-1/2, 1/2) turn
    # 24 bits of f32 hold the top bits of the fraction: error 2^-25 turn, 2e-7 rad.
    angles = wrapped.to(torch.float32) * (2 * math.pi / 2.0**TURN_BITS)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + F) of the last dimension, the layout of Hugging Face checkpoints.

    x: (..., 2F) f32; cos, sin: broadcastable to (..., F).
    """
    # Per pair a product with a 2x2 matrix: one pass over x, where halves put side by side would be
    # copied. The matrices are the same for all layers, and computed once.
    rotation = torch.stack(
        (torch.stack((cos, -sin), dim=-2), torch.stack((sin, cos), dim=-2)), dim=-3
    )  # (..., to, from, F)
    pairs = x.view(*x.shape[:-1], 2, x.shape[-1] // 2)
    return (rotation * pairs.unsqueeze(-3)).sum(-2).flatten(-2)
