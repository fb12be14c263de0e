"""What the device says of each row of logits: its best token, and sums of its softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fake_runner import best_tokens, softmax_sums
from shark_llm.artifacts.manifest import SUM_BLOCK
from shark_llm.model import llama

V = 64


def test_rows_that_cannot_be_sampled_are_told_apart() -> None:
    """NaN anywhere, +inf, and -inf alone give V; of equal logits the lowest token is taken."""
    logits = np.zeros((6, V), np.float32)
    logits[0, 7] = 1
    logits[1, 63] = np.nan
    logits[2, 5] = np.inf
    logits[3] = -np.inf
    logits[4, 0] = -np.inf
    logits[5, [9, 30]] = 2
    wanted = [7, V, V, V, 1, 9]
    assert llama.best(torch.from_numpy(logits)).tolist() == wanted
    assert best_tokens(logits).tolist() == wanted  # so the runner without a model does the same


def test_best_is_the_argmax() -> None:
    logits = np.random.default_rng(0).standard_normal((32, 257)).astype(np.float32)
    assert llama.best(torch.from_numpy(logits)).tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("vocab_size", [1, 200, 256, 257, 768])
def test_sums_are_of_whole_blocks_and_the_rest(vocab_size: int) -> None:
    """Relative to each row's best, at its own temperature; rows without a best token do no harm."""
    rng = np.random.default_rng(vocab_size)
    logits = (rng.standard_normal((4, vocab_size)) * 5).astype(np.float32)
    logits[1, -1] = -np.inf
    logits[3, 0] = np.nan
    scales = np.array([1.0, 0.5, 1e20, 1.0], np.float32)
    best = best_tokens(logits)
    if vocab_size == 1:
        assert best.tolist() == [0, 1, 0, 1]  # of -inf alone nothing can be chosen either
    sums = llama.softmax_sums(SUM_BLOCK, *map(torch.from_numpy, (logits, best, scales))).numpy()
    assert sums.shape == (4, -(-vocab_size // SUM_BLOCK))
    for row in np.flatnonzero(best < vocab_size):
        weights = np.exp((logits[row].astype(np.float64) - logits[row].max()) * scales[row])
        for block, found in enumerate(sums[row]):
            wanted = weights[block * SUM_BLOCK : (block + 1) * SUM_BLOCK].sum()
            assert found == pytest.approx(wanted, rel=1e-4)
        np.testing.assert_allclose(softmax_sums(logits, scales)[row], sums[row], rtol=1e-4)
