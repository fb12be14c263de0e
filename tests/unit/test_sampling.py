"""From logits to tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shark_llm.engine.request import SamplingParams
from shark_llm.engine.sampling import (
    SamplerState,
    sample,
    token_logprobs,
    uniform,
)

V = 64


def make_state(
    *, prompt: tuple[int, ...] = (1, 2), eos: tuple[int, ...] = (), **params: Any
) -> SamplerState:
    return SamplerState(SamplingParams(**({"max_tokens": 99} | params)), prompt, eos)


def logits_of(values: dict[int, float], fill: float = -20.0, size: int = V) -> np.ndarray:
    logits = np.full(size, fill, np.float32)
    for token, value in values.items():
        logits[token] = value
    return logits


def draw(logits: np.ndarray, state: SamplerState) -> int:
    result = sample(logits, int(logits.argmax()), state)
    assert result is not None
    return result.token_id


def draw_many(logits: np.ndarray, count: int = 2000, **params: Any) -> dict[int, float]:
    """Frequencies over as many positions of one seeded request."""
    state = make_state(seed=11, **params)
    seen: dict[int, float] = {}
    for position in range(count):
        state.num_generated = position
        token = draw(logits, state)
        seen[token] = seen.get(token, 0) + 1 / count
    return seen


def test_uniform_is_philox() -> None:
    """The generator is numpy's Philox, whose counter steps before each draw."""
    for seed in (0, 1, 2**64 - 1, 123456789):
        for position in (1, 2, 500):
            word = int(np.random.Philox(key=seed, counter=position - 1).random_raw())
            assert uniform(seed, position) == (word >> 11) * 2.0**-53
    assert 0 <= uniform(3, 0) < 1


def test_greedy_takes_the_first_of_equals() -> None:
    assert draw(logits_of({5: 3.0, 9: 3.0}), make_state(temperature=0)) == 5


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_small_temperatures_are_greedy(temperature: float, scale: float) -> None:
    """D18: no inf or NaN on the way to the limit, for logits of +-30 with a gap of 1."""
    logits = logits_of({3: 30 * scale, 4: 30 * scale - 1}, fill=-30.0 + min(scale, 0) * 30)
    for seed in range(20):
        assert draw(logits, make_state(temperature=temperature, seed=seed)) == 3


def test_temperature_two_flattens() -> None:
    logits = logits_of({0: 2.0, 1: 0.0}, fill=-100.0)
    seen = draw_many(logits, temperature=2.0)
    assert seen[0] == pytest.approx(math.e / (math.e + 1), abs=0.04)


def test_frequencies_follow_the_softmax() -> None:
    weights = {7: 0.5, 20: 0.3, 40: 0.2}
    logits = logits_of({t: math.log(w) for t, w in weights.items()}, fill=-1e9)
    seen = draw_many(logits, count=4000)
    assert set(seen) == set(weights)
    for token, weight in weights.items():
        assert seen[token] == pytest.approx(weight, abs=0.03)


@pytest.mark.parametrize("top_k", [None, V, V + 1, 10**7])
def test_top_k_beyond_the_vocabulary_is_off(top_k: int | None) -> None:
    """D20: as the server hands them over: None for off, too large means all."""
    logits = np.zeros(V, np.float32)
    assert len(draw_many(logits, top_k=top_k)) == V


def test_top_k_one_is_greedy() -> None:
    """D20"""
    logits = np.linspace(0, 1, V).astype(np.float32)
    assert draw_many(logits, count=50, top_k=1) == {V - 1: pytest.approx(1.0)}


def test_top_k_keeps_k_and_breaks_ties_by_id() -> None:
    logits = logits_of({3: 1.0, 10: 1.0, 20: 1.0, 30: 2.0})
    assert set(draw_many(logits, count=500, top_k=3)) == {3, 10, 30}


@pytest.mark.parametrize("top_p", [1e-9, 1e-3, 0.4])
def test_top_p_always_keeps_the_best(top_p: float) -> None:
    """D20: at least one token is kept."""
    logits = logits_of({8: 1.0, 9: 0.5})
    assert set(draw_many(logits, count=50, top_p=top_p)) == {8}


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    weights = {7: 0.5, 20: 0.3, 40: 0.15, 41: 0.05}
    logits = logits_of({t: math.log(w) for t, w in weights.items()}, fill=-1e9)
    assert set(draw_many(logits, count=500, top_p=0.49)) == {7}
    assert set(draw_many(logits, count=500, top_p=0.7)) == {7, 20}
    assert set(draw_many(logits, count=500, top_p=0.9)) == {7, 20, 40}


def test_top_p_counts_within_top_k() -> None:
    """The mass is that of what top_k left: 0.5 / 0.8 already passes 0.6."""
    weights = {7: 0.5, 20: 0.3, 40: 0.2}
    logits = logits_of({t: math.log(w) for t, w in weights.items()}, fill=-1e9)
    assert set(draw_many(logits, count=500, top_k=2, top_p=0.6)) == {7}


def test_min_p_is_relative_to_the_best() -> None:
    weights = {7: 0.5, 20: 0.3, 40: 0.2}
    logits = logits_of({t: math.log(w) for t, w in weights.items()}, fill=-1e9)
    assert set(draw_many(logits, count=500, min_p=0.5)) == {7, 20}
    assert set(draw_many(logits, count=500, min_p=0.5, top_p=0.95)) == {7, 20}
    assert set(draw_many(logits, count=500, min_p=1.0)) == {7}


def test_seed_fixes_the_draws() -> None:
    logits = np.zeros(V, np.float32)

    def tokens(seed: int | None) -> list[int]:
        state = make_state(seed=seed)
        result = []
        for _ in range(20):
            result.append(draw(logits, state))
            state.accept(result[-1])
        return result

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)
    assert tokens(-1) == tokens(2**64 - 1)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = logits_of({1: 5.0, 3: 4.5, 4: 4.0})
    state = make_state(temperature=0, presence_penalty=0.4, frequency_penalty=0.2, prompt=(1, 3))
    assert draw(logits, state) == 1
    state.accept(1)  # 5 - 0.4 - 0.2 = 4.4
    assert draw(logits, state) == 3
    state.accept(3)  # 3.9; token 1 still at 4.4
    assert draw(logits, state) == 1
    state.accept(1)  # 4.2
    state.accept(1)  # 4.0: token 1 and 4 tie, the lower id wins
    assert draw(logits, state) in (1, 4)
    state.accept(1)
    assert draw(logits, state) == 4


def test_repetition_counts_the_prompt_too() -> None:
    logits = logits_of({1: 5.0, 3: 4.0}, fill=-8.0)
    assert draw(logits, make_state(temperature=0, repetition_penalty=2.0, prompt=(1,))) == 3
    below = logits_of({1: -1.0, 3: -1.5}, fill=-8.0)
    assert draw(below, make_state(temperature=0, repetition_penalty=2.0, prompt=(1,))) == 3


def test_many_distinct_tokens_can_be_counted() -> None:
    state = make_state(temperature=0, presence_penalty=1.0, prompt=())
    for token in range(500):
        state.accept(token)
        state.accept(token)
    ids, counts = state.counts.arrays()
    assert ids.tolist() == list(range(500))
    assert counts.tolist() == [2.0] * 500


def test_logit_bias() -> None:
    logits = logits_of({1: 5.0, 3: 4.0})
    assert draw(logits, make_state(temperature=0, logit_bias={3: 2.0})) == 3
    assert draw(logits, make_state(temperature=0, logit_bias={1: -100.0})) == 3


def test_logits_are_never_written_to() -> None:
    logits = logits_of({1: 5.0, 3: 4.0})
    logits.setflags(write=False)
    draw(logits, make_state(logit_bias={3: 2.0}, repetition_penalty=1.5, min_tokens=3, eos=(1,)))
    draw(logits, make_state(top_k=3, top_p=0.5, min_p=0.1, temperature=0.7, logprobs=2))


def test_min_tokens_bans_eos_and_stop_tokens() -> None:
    logits = logits_of({1: 5.0, 2: 4.5, 3: 4.0})
    state = make_state(temperature=0, min_tokens=1, eos=(1,), stop_token_ids=frozenset({2}))
    assert draw(logits, state) == 3
    state.accept(3)
    assert draw(logits, state) == 1


def test_nothing_left_to_choose() -> None:
    every = frozenset(range(V))
    logits = np.zeros(V, np.float32)
    assert sample(logits, 0, make_state(min_tokens=1, stop_token_ids=every)) is None


def test_ignore_eos() -> None:
    assert make_state(eos=(1,), ignore_eos=True).stop_ids == frozenset()
    assert make_state(eos=(1, 4)).stop_ids == {1, 4}


@pytest.mark.parametrize(
    ("params", "takes_best"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 0.0, "logprobs": 0}, False),
        ({"temperature": 0.0, "presence_penalty": 0.5}, False),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, False),
        ({"temperature": 0.0, "min_tokens": 1, "stop_token_ids": frozenset({9})}, False),
        ({"temperature": 0.0, "min_tokens": 1}, True),  # nothing could end the text early
    ],
)
def test_logits_are_asked_for_where_the_best_token_is_not_enough(
    params: dict[str, Any], takes_best: bool
) -> None:
    state = make_state(**params)
    assert state.takes_best == takes_best
    if takes_best:
        drawn = sample(None, 7, state)
        assert drawn is not None
        assert drawn.token_id == 7


def test_min_tokens_ask_for_logits_only_so_long() -> None:
    state = make_state(temperature=0.0, min_tokens=1, eos=(9,))
    assert not state.takes_best
    state.accept(4)
    assert state.takes_best


def test_logprobs_are_of_the_model_not_of_the_sampler() -> None:
    logits = np.random.default_rng(0).standard_normal(V).astype(np.float32)
    state = make_state(logprobs=3, temperature=0.2, top_k=2, logit_bias={5: 50.0})
    result = sample(logits, int(logits.argmax()), state)
    assert result is not None
    assert result.token_id == 5
    reference = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(reference[5], abs=1e-5)
    order = np.argsort(-reference)[:3]
    assert [token for token, _ in result.logprobs.top] == order.tolist()
    assert [value for _, value in result.logprobs.top] == pytest.approx(reference[order], abs=1e-5)


def test_logprobs_zero_and_too_many() -> None:
    logits = np.zeros(V, np.float32)
    assert token_logprobs(logits, 0, 3, 0).top == ()
    assert token_logprobs(logits, 0, 3, 0).logprob == pytest.approx(-math.log(V))
    assert [token for token, _ in token_logprobs(logits, 0, 3, 999).top] == list(range(V))


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000, 49152])
def test_any_vocabulary_size(size: int) -> None:
    logits = np.random.default_rng(size).standard_normal(size).astype(np.float32) * 3
    for seed in range(30):
        for params in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}):
            assert 0 <= draw(logits, make_state(seed=seed, **params)) < size
