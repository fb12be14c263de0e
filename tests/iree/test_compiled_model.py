"""Rung 4: compiled modules, through the runner that serves them, against transformers.

Every pool is filled with NaN before a test begins (C06), so each test also shows that what nobody
wrote does not count. Tolerances are shares of the largest |logit|: docs/correctness.md says why.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiled import running
from fake_runner import softmax_sums
from ladder import (
    LENGTHS,
    Sequencer,
    assert_close,
    assert_same_choices,
    generate,
    logits_of,
    token_ids,
    walk,
)
from shark_llm.runtime.devices import DTYPES
from shark_llm.runtime.module import IreeRunner
from shark_llm.runtime.runner import Row

CompiledModel = Callable[[str], Any]  # of conftest.py: name -> Compiled

SHARES = {"t0": 1e-5, "wide": 5e-3, "tp2": 1e-5, "tp3": 1e-5, "tp8": 1e-5, "shared": 1e-5}
SHARES |= {"int8": 5e-2, "int8_tp3": 5e-2}  # against the dequantized weights
DECODED = 4


def on(*names: str) -> pytest.MarkDecorator:
    """Run on these bundles."""
    return pytest.mark.parametrize(
        ("runner", "name"), [(n, n) for n in names], ids=names, indirect=["runner"]
    )


@on(*SHARES)
def test_every_length_equals_transformers(
    runner: IreeRunner, name: str, compiled: CompiledModel
) -> None:
    """C01, C05, C11, B01, B03, B08: prefill and decode of every length; entry points have more rows
    than the request needs, and decode crosses page boundaries at 16 and 32."""
    judge = compiled(name).judge
    tokens = token_ids(max(LENGTHS) + DECODED, runner.vocab_size)
    wanted = judge.logits(tokens)
    tolerance = SHARES[name] * float(np.abs(wanted).max())
    for length in LENGTHS:
        found = walk(runner, tokens[: length + DECODED], length)
        expected = wanted[length - 1 : length + DECODED]
        assert_close(found, expected, tolerance, f"{length} tokens")


@on("t0", "wide", "tp2", "tp8")
def test_chunked_prefill_equals_transformers(
    runner: IreeRunner, name: str, compiled: CompiledModel
) -> None:
    """C02: chunks of one and of two pages, with up to six pages of history."""
    tokens = token_ids(101, runner.vocab_size, seed=2)
    wanted = compiled(name).judge.logits(tokens)[99:]
    tolerance = SHARES[name] * float(np.abs(wanted).max())
    for chunk in (16, 32):
        found = walk(runner, tokens, 100, chunk=chunk)
        assert_close(found, wanted, tolerance, f"chunks of {chunk}")


@on(*SHARES)
def test_greedy_tokens_equal_transformers(
    runner: IreeRunner, name: str, compiled: CompiledModel
) -> None:
    """Two rows at a time, one of them a prompt of one token, which begins as decode at 0."""
    judge = compiled(name).judge
    for length in (1, 15, 33):
        prompts = [token_ids(n, runner.vocab_size, seed=n) for n in (length, 1)]
        found = generate(runner, prompts, 6)
        for prompt, tokens in zip(prompts, found, strict=True):
            wanted, gaps = judge.greedy(prompt, 6)
            tolerance = SHARES[name] * float(np.abs(judge.logits(prompt)).max())
            assert_same_choices(tokens, wanted, gaps, tolerance)


@on("t0")
def test_rows_together_equal_rows_alone(
    runner: IreeRunner, name: str, compiled: CompiledModel
) -> None:
    """Four rows of different lengths in prefill and decode of 4, each against the row alone."""
    prompts = [token_ids(n, seed=n) for n in (100, 17, 2, 32)]
    together = generate(runner, prompts, 5, first_page=30)
    for prompt, tokens in zip(prompts, together, strict=True):
        (alone,) = generate(runner, [prompt], 5)
        assert tokens == alone
        wanted, gaps = compiled(name).judge.greedy(prompt, 5)
        assert_same_choices(tokens, wanted, gaps, 1e-3)


@on("t0")
def test_same_prompt_four_times_twice(
    runner: IreeRunner, name: str, compiled: CompiledModel
) -> None:
    """C08: four equal prompts in one batch, then four behind the first's cached pages."""
    prompt = token_ids(40, seed=8)
    wanted = compiled(name).judge.logits(prompt)[-1]
    tolerance = SHARES[name] * float(np.abs(wanted).max())
    sequences = [Sequencer(prompt, first_page=1 + 3 * i) for i in range(4)]
    first = logits_of(runner, "prefill", [s.row(0, 40) for s in sequences]).copy()
    again = [Row(tokens=prompt[32:], start=32, pages=[1, 2, 20 + i]) for i in range(4)]
    second = logits_of(runner, "prefill", again)
    for i, found in enumerate([*first, *second]):
        assert_close(found, wanted, tolerance, f"text {i}")


@on("t0", "tp2", "tp8")
def test_two_rows_share_a_prefix(runner: IreeRunner, name: str, compiled: CompiledModel) -> None:
    """E02: two rows of one batch read the same two pages, in prefill and in decode."""
    prefix = token_ids(32, runner.vocab_size, seed=3)
    tails = [token_ids(9, runner.vocab_size, seed=seed) for seed in (4, 5)]
    runner.run("prefill", [Row(tokens=prefix, start=0, pages=[1, 2])])
    for phase, stop in (("prefill", 8), ("decode", 9)):
        rows = [
            Row(
                tokens=tail[:8] if phase == "prefill" else tail[8:],
                start=32 if phase == "prefill" else 40,
                pages=[1, 2, 3 + i],
            )
            for i, tail in enumerate(tails)
        ]
        found = logits_of(runner, phase, rows)
        for tail, logits in zip(tails, found, strict=True):
            wanted = compiled(name).judge.logits([*prefix, *tail[:stop]])[-1]
            tolerance = SHARES[name] * float(np.abs(wanted).max())
            assert_close(logits, wanted, tolerance, f"{phase} behind a shared prefix")


@on(*SHARES)
@pytest.mark.parametrize("value", [0.0, 1e30])
def test_what_was_in_the_pool_changes_no_bit(runner: IreeRunner, name: str, value: float) -> None:
    """C06: a pool of NaN and a pool of 1e30 give the bits that a zeroed pool gives."""
    tokens = token_ids(35, runner.vocab_size)
    after_nan = walk(runner, tokens, 30)
    for i, spec in enumerate(runner._specs):
        shape = [runner.num_pages if isinstance(dim, str) else dim for dim in spec.shape]
        filled = np.full(shape, value, DTYPES[spec.dtype][1])
        runner._caches[i] = runner._devices.upload(spec.rank, filled, spec.dtype)
    np.testing.assert_array_equal(walk(runner, tokens, 30), after_nan)


@on(*SHARES)
def test_rows_of_nan_have_no_best_token(runner: IreeRunner, name: str) -> None:
    """C06: a row that reads pages which nobody wrote says so, beside one that is sound."""
    sound, first = token_ids(17, runner.vocab_size), [Row(tokens=[5], start=0, pages=[9])]
    runner.run("prefill", [Row(tokens=sound[:16], start=0, pages=[1])])
    rows = [
        Row(tokens=sound[16:], start=16, pages=[1, 2]),
        Row(tokens=[5], start=16, pages=[3, 4]),
    ]
    logits_of(runner, "decode", first)
    logits = logits_of(runner, "decode", rows)
    output = runner.run("decode", rows)
    assert np.isfinite(logits[0]).all()
    assert output.best_tokens.tolist() == [logits[0].argmax(), runner.vocab_size]


@on("t0", "tp2")
def test_sums_can_be_asked_for_twice(runner: IreeRunner, name: str) -> None:
    """At other temperatures, of fewer rows than the batch has; and of no step but the last."""
    tokens = token_ids(16, runner.vocab_size)
    rows = [Row(tokens=tokens, start=0, pages=[page]) for page in (1, 2)]
    output = runner.run("prefill", rows)
    scales = [np.array(pair, np.float32) for pair in ((1, 1), (0.5, 2))]
    found = [output.read_sums(scale) for scale in scales]
    for sums, scale in zip(found, scales, strict=True):
        wanted = softmax_sums(output.read_logits(), scale)
        np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-7)
    assert not np.array_equal(*found)
    runner.run("prefill", rows)
    with pytest.raises(AssertionError, match="an earlier step"):
        output.read_sums(scales[0])


@on("t0", "tp2", "tp3", "tp8")
def test_runs_are_equal_to_the_bit(runner: IreeRunner, name: str, compiled: CompiledModel) -> None:
    """B13: the same steps again, and on a device of one thread, give the same bits."""
    tokens = token_ids(40, runner.vocab_size)
    first = walk(runner, tokens, 33)
    for _ in range(5):
        np.testing.assert_array_equal(walk(runner, tokens, 33), first)
    with running(compiled(name).bundle, driver="local-sync") as other:
        np.testing.assert_array_equal(walk(other, tokens, 33), first)


@on("tp2")
def test_workers_of_a_loaded_model_may_use_every_core(runner: IreeRunner, name: str) -> None:
    """IREE pins each to a core, and a step waits for the one whose core has most to do."""
    workers = [
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().startswith("iree-worker")
    ]
    assert len(workers) >= 2
    assert {frozenset(os.sched_getaffinity(worker)) for worker in workers} == {
        frozenset(os.sched_getaffinity(0))
    }


def test_closing_twice_and_late_is_safe(compiled: CompiledModel) -> None:
    """Logits outlive the runner; closing again does nothing."""
    with running(compiled("t0").bundle) as runner:
        logits = logits_of(runner, "decode", [Row(tokens=[5], start=0, pages=[1])])
    runner.close()
    gc.collect()
    assert np.isfinite(logits).all()
