"""The best token of each row, as the device chooses it."""

from __future__ import annotations

import numpy as np
import torch

from fake_runner import best_tokens
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
