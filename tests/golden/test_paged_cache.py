"""Rows do not see each other, nor what nobody wrote: batches, shared pages, poisoned pools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ladder import (
    LENGTHS,
    PAGE,
    EagerRunner,
    Judge,
    Sequencer,
    assert_close,
    generate,
    logits_of,
    token_ids,
    walk,
)
from shark_llm.model.llama import AttentionForm
from shark_llm.runtime.module import pack_rows
from shark_llm.runtime.runner import Row

F32 = 1e-5
Judged = Callable[[str, str], tuple[Path, Judge]]
FORMS: list[AttentionForm] = ["matmul", "fused"]


@pytest.mark.parametrize("form", FORMS)
def test_rows_together_equal_rows_alone(judged: Judged, form: AttentionForm) -> None:
    """Four rows of different lengths in one prefill, then in decode batches."""
    directory, judge = judged("gqa", "f32")
    runner = EagerRunner(directory, form=form)
    rows = [
        Sequencer(token_ids(n + 1, seed=n), first_page=1 + 8 * i)
        for i, n in enumerate((100, 17, 1, 32))
    ]
    wanted = [judge.logits(row.tokens)[-2:] for row in rows]
    prefill = logits_of(runner, "prefill", [row.row(0, len(row.tokens) - 1) for row in rows]).copy()
    decode = logits_of(
        runner, "decode", [row.row(len(row.tokens) - 1, len(row.tokens)) for row in rows]
    )
    for i, of_row in enumerate(wanted):
        tolerance = F32 * float(np.abs(of_row).max())
        assert_close(np.stack([prefill[i], decode[i]]), of_row, tolerance, f"row {i}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_poisoned_pool_changes_nothing(
    judged: Judged, form: AttentionForm, value: float, dtype: str
) -> None:
    """C06: what nobody wrote does not count, whatever it is: not a bit changes."""
    directory, _ = judged("gqa", dtype)
    tokens = token_ids(104)
    clean, poisoned = (EagerRunner(directory, dtype=dtype, form=form) for _ in range(2))
    for length in LENGTHS:
        poisoned.fill(value)
        clean.fill(0.0)
        one = walk(clean, tokens[: length + 3], length)
        other = walk(poisoned, tokens[: length + 3], length)
        np.testing.assert_array_equal(one, other, err_msg=f"{length} tokens")


@pytest.mark.parametrize("form", FORMS)
def test_unused_rows_leave_the_scratch_page_finite(judged: Judged, form: AttentionForm) -> None:
    """C05: one request of 17 tokens in a batch of 4, scratch in its table's padding: page 0 stays
    finite, and the row equals the row alone."""
    directory, judge = judged("gqa", "f32")
    runner = EagerRunner(directory, form=form)
    tokens = token_ids(18)
    wanted = judge.logits(tokens)
    tolerance = F32 * float(np.abs(wanted).max())
    runner.fill(float("nan"))
    for cache in runner.model.caches[0]:
        cache[0] = 0.0

    def forward(phase: str, row: Row) -> np.ndarray:
        padded = Row(tokens=row.tokens, start=row.start, pages=[*row.pages, 0])
        inputs = pack_rows([padded], 4, PAGE, phase)  # type: ignore[arg-type]
        found = runner.model.forward(phase, *map(torch.from_numpy, inputs))  # type: ignore[arg-type]
        for cache in runner.model.caches[0]:
            assert cache[0].isfinite().all(), "page 0 is everybody's padding"
        assert found.isfinite().all()
        return found.numpy()[0]

    sequence = Sequencer(tokens, first_page=5)
    assert_close(forward("prefill", sequence.row(0, 17)), wanted[16], tolerance, "prefill")
    assert_close(forward("decode", sequence.row(17, 18)), wanted[17], tolerance, "decode")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_row_with_nothing_to_see_harms_no_other(
    judged: Judged, form: AttentionForm, dtype: str
) -> None:
    """C04: three rows whose every key is masked (length 0, which the runner never sends) and one
    request: the request's logits are those it has alone, then and in the next step."""
    directory, _ = judged("gqa", "f32")
    tokens = token_ids(18)
    row = Sequencer(tokens, first_page=1)
    alone = walk(EagerRunner(directory, dtype=dtype, form=form), tokens, 17)
    runner = EagerRunner(directory, dtype=dtype, form=form)
    steps = (("prefill", row.row(0, 17)), ("decode", row.row(17, 18)))
    for (phase, of_step), wanted in zip(steps, alone, strict=True):
        inputs = pack_rows([of_step], 4, PAGE, phase)  # type: ignore[arg-type]
        inputs[2][1:] = 0
        found = runner.model.forward(phase, *map(torch.from_numpy, inputs))  # type: ignore[arg-type]
        np.testing.assert_allclose(found[0], wanted, rtol=0, atol=1e-4)


def test_same_prompt_four_times_twice(judged: Judged) -> None:
    """C08, E01: a 40-token prompt four times in one batch, and again from its first two pages."""
    directory, judge = judged("gqa", "f32")
    runner = EagerRunner(directory)
    prompt = token_ids(40, seed=8)
    wanted = judge.logits(prompt)[-1]
    tolerance = F32 * float(np.abs(wanted).max())
    sequences = [Sequencer(prompt, first_page=1 + 3 * i) for i in range(4)]
    first = logits_of(runner, "prefill", [s.row(0, 40) for s in sequences]).copy()
    again = []
    for i, sequence in enumerate(sequences):
        whole = sequence.row(32, 40)
        pages = [*whole.pages[:2], 20 + i]  # the tail goes to a page of its own
        again.append(Row(tokens=whole.tokens, start=32, pages=pages))
    second = logits_of(runner, "prefill", again)
    for i, found in enumerate([*first, *second]):
        assert_close(found, wanted, tolerance, f"text {i}")


def test_two_rows_share_a_prefix(judged: Judged) -> None:
    """E02, E03: two rows read the same two pages, one goes on by prefill, one by decode; the pages'
    contents stay what they were."""
    directory, judge = judged("gqa", "f32")
    runner = EagerRunner(directory)
    prefix, tails = token_ids(32, seed=3), [token_ids(9, seed=4), token_ids(1, seed=5)]
    runner.run("prefill", [Row(tokens=prefix, start=0, pages=[1, 2])])
    before = [cache[1:3].clone() for cache in runner.model.caches[0]]
    prefill = Row(tokens=tails[0], start=32, pages=[1, 2, 3])
    decode = Row(tokens=tails[1], start=32, pages=[1, 2, 4])
    found = [logits_of(runner, "prefill", [prefill])[0].copy()]
    found.append(logits_of(runner, "decode", [decode])[0].copy())
    for tail, logits in zip(tails, found, strict=True):
        wanted = judge.logits([*prefix, *tail])[-1]
        assert_close(logits, wanted, F32 * float(np.abs(wanted).max()), f"tail of {len(tail)}")
    for old, cache in zip(before, runner.model.caches[0], strict=True):
        assert torch.equal(old, cache[1:3])


def test_whole_prompt_cached_runs_its_last_token_again(judged: Judged) -> None:
    """E03: a prompt of exactly two pages is in the cache: its last token is a decode row at 31."""
    directory, judge = judged("gqa", "f32")
    runner = EagerRunner(directory)
    prompt = token_ids(32, seed=6)
    runner.run("prefill", [Row(tokens=prompt, start=0, pages=[1, 2])])
    found = logits_of(runner, "decode", [Row(tokens=prompt[31:], start=31, pages=[1, 2])])[0]
    wanted = judge.logits(prompt)[-1]
    assert_close(found, wanted, F32 * float(np.abs(wanted).max()), "token 31 again")


def test_one_token_prompts_begin_by_decode(judged: Judged) -> None:
    """C01: prompts of one token are decode rows at position 0, beside rows far along."""
    directory, judge = judged("gqa", "f32")
    runner = EagerRunner(directory)
    runner.fill(float("nan"))
    prompts = [[7], token_ids(33, seed=1), [200]]
    found = generate(runner, prompts, 6)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == judge.greedy(prompt, 6)[0]


def test_scattered_pages_equal_contiguous_ones(judged: Judged) -> None:
    """The table decides which page holds what, in any order."""
    directory, judge = judged("gqa", "f32")
    runner = EagerRunner(directory)
    tokens = token_ids(50, seed=2)
    wanted = judge.logits(tokens)[-1]
    found = logits_of(runner, "prefill", [Row(tokens=tokens, start=0, pages=[40, 3, 63, 9])])[0]
    assert_close(found, wanted, F32 * float(np.abs(wanted).max()), "scattered pages")
