"""The filters against a plain reference that sorts everything."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shark_llm.engine.request import SamplingParams
from shark_llm.engine.sampling import (
    SamplerState,
    _draw,
    _nucleus,
    _top_k,
    sample,
    uniform,
)

LOGITS = st.one_of(
    st.integers(0, 2**32 - 1).map(
        lambda seed: (
            np.random.default_rng(seed).standard_normal(1 + seed % 3000) * (seed % 7)
        ).astype(np.float32)
    ),
    # Few distinct values: ties everywhere.
    st.lists(st.sampled_from([-30.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=700).map(
        lambda values: np.array(values, np.float32)
    ),
)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.05, 2),
        "top_k": st.integers(2, 100),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
    },
)


def allowed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Ids that top_k, top_p and min_p leave, with room for rounding at the edges: by sorting."""
    z = (logits.astype(np.float64) - logits.max()) / params.temperature
    order = np.lexsort((np.arange(len(z)), -z))
    if params.top_k is not None:
        order = order[: params.top_k]
    weights = np.exp(z[order])
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
    keep = (before < params.top_p + 1e-4) & (weights >= params.min_p * (1 - 1e-4))
    keep[0] = True
    return order[keep]


@settings(max_examples=300, deadline=None)
@given(logits=LOGITS, params=PARAMS, seed=st.integers(0, 2**64 - 1))
def test_draws_only_what_the_filters_leave(
    logits: np.ndarray, params: dict[str, Any], seed: int
) -> None:
    sampling = SamplingParams(max_tokens=1, seed=seed, **params)
    best = int(logits.argmax())
    result = sample(logits, best, SamplerState(sampling, (), ()))
    assert result is not None
    edge = logits[allowed(logits, sampling)].min()
    # A tie at the edge may be cut at another id, where rounding decides; a lower value never.
    assert logits[result.token_id] >= edge


@settings(max_examples=300, deadline=None)
@given(logits=LOGITS, top_p=st.floats(1e-6, 0.9999))
def test_nucleus_is_smallest_and_sufficient(logits: np.ndarray, top_p: float) -> None:
    weights = np.exp(logits - logits.max())
    total = float(weights.sum(dtype=np.float64))
    kept = _nucleus(weights, top_p * total)
    mass = float(weights[kept].sum(dtype=np.float64))
    assert len(kept) >= 1
    assert len(set(kept.tolist())) == len(kept)
    assert mass >= top_p * total * (1 - 1e-5)
    smallest = float(weights[kept].min())
    assert mass - smallest <= top_p * total * (1 + 1e-5)
    dropped = np.delete(weights, kept)
    assert len(dropped) == 0 or dropped.max() <= smallest
    ties = np.flatnonzero(weights == np.float32(smallest))
    chosen = [token for token in kept.tolist() if token in set(ties.tolist())]
    assert chosen == ties[: len(chosen)].tolist()


@settings(max_examples=300, deadline=None)
@given(logits=LOGITS, temperature=st.floats(0.05, 2), u=st.floats(0, 1, exclude_max=True))
def test_the_draw_inverts_the_distribution_function(
    logits: np.ndarray, temperature: float, u: float
) -> None:
    """Tokens in order of their ids, as a running sum over all of them in f64 says."""
    sampling = SamplingParams(max_tokens=1, temperature=temperature)
    token = _draw(logits, int(logits.argmax()), sampling, u)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    sums = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()
    assert sums[token] - 1e-5 <= u <= sums[token + 1] + 1e-5
    assert weights[token] > 0


@settings(max_examples=200, deadline=None)
@given(logits=LOGITS, k=st.integers(1, 3100))
def test_top_k_is_the_head_of_a_stable_sort(logits: np.ndarray, k: int) -> None:
    expected = np.sort(np.argsort(-logits, kind="stable")[:k])
    assert _top_k(logits, k).tolist() == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(logits=LOGITS, params=PARAMS, seed=st.integers(-(2**63), 2**64 - 1), n=st.integers(0, 10**6))
def test_same_seed_and_position_same_token(
    logits: np.ndarray, params: dict[str, Any], seed: int, n: int
) -> None:
    """Whatever was drawn before, for this or any other request."""
    tokens = set()
    for _ in range(2):
        state = SamplerState(SamplingParams(max_tokens=1, seed=seed, **params), (), ())
        state.num_generated = n
        result = sample(logits.copy(), int(logits.argmax()), state)
        assert result is not None
        tokens.add(result.token_id)
    assert len(tokens) == 1


def test_uniform_is_uniform() -> None:
    values = np.array([uniform(seed, n) for seed in range(40) for n in range(500)])
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    # chi-square with 19 degrees of freedom: 43.8 is passed once in a thousand times.
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
