"""The filters against a plain reference that sorts everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import softmax_sums
from shark_llm.engine.drawing import Softmax, _nucleus, draw, top_k
from shark_llm.engine.request import SamplingParams
from shark_llm.engine.sampling import SamplerState, _edit, sample, uniform

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
    kept, found = _nucleus(
        Softmax(logits, int(logits.argmax()), 1).above, top_p, total, len(logits)
    )
    np.testing.assert_array_equal(found, weights[kept])
    mass = float(found.sum(dtype=np.float64))
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
    token = draw(Softmax(logits, int(logits.argmax()), temperature), sampling, u)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    sums = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()
    assert sums[token] - 1e-5 <= u <= sums[token + 1] + 1e-5
    assert weights[token] > 0


@settings(max_examples=300, deadline=None)
@given(
    logits=LOGITS,
    params=PARAMS,
    edits=st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.5, 2),
            "logit_bias": st.dictionaries(st.integers(0, 0), st.floats(-100, 100)),
            "min_tokens": st.just(1),
            "logprobs": st.integers(0, 3),
        },
    ),
    prompt=st.lists(st.integers(0, 3000), max_size=20),
    seed=st.integers(0, 2**64 - 1),
)
def test_sums_of_the_device_change_nothing(
    logits: np.ndarray,
    params: dict[str, Any],
    edits: dict[str, Any],
    prompt: list[int],
    seed: int,
) -> None:
    """The same token and logprobs as from the logits alone, but for where rounding decides."""
    size = len(logits)
    sampling = SamplingParams(max_tokens=1, seed=seed, **params, **edits)
    state = SamplerState(sampling, [token % size for token in prompt], ())
    best = int(logits.argmax())
    scale = state.inverse_temperature
    sums, unit = (
        None if s is None else softmax_sums(logits[None], np.array([s], np.float32))[0]
        for s in (scale, 1.0)
    )
    alone, helped = sample(logits, best, state), sample(logits, best, state, sums, unit)
    assert alone is not None
    assert helped is not None
    if alone.token_id == helped.token_id:
        assert (alone.logprobs is None) == (helped.logprobs is None)
        if alone.logprobs is not None and helped.logprobs is not None:
            assert helped.logprobs.logprob == pytest.approx(alone.logprobs.logprob, abs=1e-4)
        return
    # A neighbour of those that are left, at a draw on the edge between the two.
    edited = logits if not state.edits_logits else _edit(logits, state).logits
    softmax = Softmax(edited, int(edited.argmax()), sampling.temperature)
    between = sorted((alone.token_id, helped.token_id))
    share = softmax.weights(edited[between[0] : between[1] + 1]).astype(np.float64)
    left = np.isin(np.arange(between[0], between[1] + 1), allowed(edited, sampling))
    assert (share * left)[1:-1].sum() <= 1e-4 * softmax.sums().sum()


@settings(max_examples=200, deadline=None)
@given(logits=LOGITS, k=st.integers(1, 3100))
def test_top_k_is_the_head_of_a_stable_sort(logits: np.ndarray, k: int) -> None:
    expected = np.sort(np.argsort(-logits, kind="stable")[:k])
    assert top_k(logits, k).tolist() == expected.tolist()


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
