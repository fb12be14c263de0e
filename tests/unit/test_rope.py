"""Rotary position embedding against transformers, against f64, and against figures by hand."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from bundles import model_config
from shark_llm.model.config import RopeConfig
from shark_llm.model.rope import (
    attention_scaling,
    cos_sin,
    inverse_frequencies,
    rotate,
    turn_fractions,
)

LLAMA32 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "rope_scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        LLAMA32,
        {**LLAMA32, "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
        YARN,
        {**YARN, "attention_factor": 1.2079},
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    ],
    ids=lambda value: "default" if value is None else "-".join(map(str, value.values())),
)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 500000.0), (128, 10000.0), (100, 1e6)])
def test_frequencies_equal_transformers(
    rope_scaling: dict[str, Any] | None, head_dim: int, theta: float
) -> None:
    hf = {
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "head_dim": head_dim,
        "max_position_embeddings": 65536,
        "rope_theta": theta,
        "rope_scaling": rope_scaling,
    }
    rope = model_config(**hf).rope
    theirs = LlamaRotaryEmbedding(LlamaConfig(**deepcopy(hf)))  # it writes into dicts
    found = inverse_frequencies(rope, head_dim)
    np.testing.assert_allclose(found, theirs.inv_freq.double().numpy(), rtol=2e-6)
    assert attention_scaling(rope) == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_llama3_bands_by_hand() -> None:
    """C15: Llama 3.2's frequencies, unchanged, in between and divided."""
    rope = RopeConfig(
        rope_type="llama3", theta=5e5, factor=32.0, original_max_position_embeddings=8192
    )
    found, plain = inverse_frequencies(rope, 64), inverse_frequencies(RopeConfig(theta=5e5), 64)
    expected = {14: 3.211446e-03, 15: 1.290548e-03, 16: 4.295568e-04, 17: 9.708288e-05}
    for pair, value in (expected | {31: 9.418307e-08}).items():
        assert found[pair] == pytest.approx(value, rel=1e-6), pair
    np.testing.assert_array_equal(found[:15], plain[:15])
    np.testing.assert_allclose(found[18:], plain[18:] / 32, rtol=1e-12)


def test_linear_scaling_slows_positions() -> None:
    """A10: with factor 4, position 8 has the angles of position 2."""
    linear = RopeConfig(rope_type="linear", theta=10000.0, factor=4.0)
    found = cos_sin(torch.tensor([8]), turn_fractions(linear, 16), 1.0)
    wanted = cos_sin(torch.tensor([2]), turn_fractions(RopeConfig(), 16), 1.0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-7)


@pytest.mark.parametrize("position", [0, 1, 257, 511, 4095, 131071, (1 << 22) - 1])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_angles_are_exact_at_any_position(position: int, theta: float) -> None:
    """C09: cos and sin against f64; angles made in f32 would be off by 8e-3 at 131071."""
    rope = RopeConfig(theta=theta)
    cos, sin = cos_sin(torch.tensor([position]), turn_fractions(rope, 128), 1.0)
    angles = position * inverse_frequencies(rope, 128)
    limit = 1e-6 + position * 2.0**-41 * 2 * math.pi  # of the fixed-point fraction
    assert limit < 1e-3
    assert np.abs(cos[0].double().numpy() - np.cos(angles)).max() < limit
    assert np.abs(sin[0].double().numpy() - np.sin(angles)).max() < limit


def test_neighbouring_positions_stay_apart() -> None:
    """C09: 256 and 257, 259 and 260 have angles of their own."""
    positions = torch.tensor([256, 257, 259, 260])
    cos, sin = cos_sin(positions, turn_fractions(RopeConfig(), 128), 1.0)
    turned = torch.atan2(sin, cos)[:, 0]
    steps = torch.remainder(turned - turned[0], 2 * math.pi)
    torch.testing.assert_close(steps, torch.tensor([0.0, 1.0, 3.0, 4.0]), rtol=0, atol=1e-5)


def test_scaling_multiplies_both() -> None:
    fractions = turn_fractions(RopeConfig(), 16)
    plain = cos_sin(torch.arange(9), fractions, 1.0)
    scaled = cos_sin(torch.arange(9), fractions, 1.25)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(one * 1.25, other)


def test_rotation_equals_transformers() -> None:
    """Pairs are (i, i + F), as in Hugging Face checkpoints."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 7, 3, 16, generator=generator)  # (N, S, A, D)
    cos, sin = cos_sin(torch.arange(7).expand(2, 7), turn_fractions(RopeConfig(), 16), 1.0)
    found = rotate(q, cos[:, :, None], sin[:, :, None])
    whole = (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    wanted, _ = apply_rotary_pos_emb(q, q, *whole, unsqueeze_dim=2)
    torch.testing.assert_close(found, wanted)


def test_yarn_of_a_short_context_has_a_ramp() -> None:
    """Correction range of one point: no division by zero."""
    rope = RopeConfig(
        rope_type="yarn",
        theta=10000.0,
        factor=4.0,
        original_max_position_embeddings=2,
        beta_fast=1.0,
        beta_slow=1.0,
    )
    assert np.isfinite(inverse_frequencies(rope, 16)).all()
