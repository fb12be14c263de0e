"""Rungs 1 to 3: transformers f32 == eager in one prefill == paged eager, at every tp.

Tolerances are shares of the largest |logit| of the sequence; docs/correctness.md says why.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ladder import (
    KINDS,
    LENGTHS,
    EagerRunner,
    Judge,
    assert_close,
    assert_same_choices,
    generate,
    token_ids,
    walk,
)
from shark_llm.model.llama import AttentionForm
from tiny import tiny_config, write_tiny

F32, BF16, BF16_NARROW = 1e-5, 5e-3, 1e-2
DECODED = 4
Judged = Callable[[str, str], tuple[Path, Judge]]


def check_walks(
    runner: EagerRunner, judge: Judge, share: float, *, chunk: int | None = None
) -> None:
    """Prefill and decode of every length against the judge's logits at the same positions."""
    tokens = token_ids(max(LENGTHS) + DECODED, runner.vocab_size)
    wanted = judge.logits(tokens)
    tolerance = share * float(np.abs(wanted).max())
    for length in LENGTHS:
        found = walk(runner, tokens[: length + DECODED], length, chunk=chunk)
        what = f"{length} tokens in chunks of {chunk}"
        assert_close(found, wanted[length - 1 : length + DECODED], tolerance, what)


@pytest.mark.parametrize("kind", KINDS)
def test_paged_prefill_and_decode_equal_transformers(judged: Judged, kind: str) -> None:
    """A05, A06, A10, A12, C01, C11: every kind of checkpoint, lengths around the page size; decode
    from 15 and 31 reaches positions 16 and 32, where a new page begins."""
    directory, judge = judged(kind, "f32")
    check_walks(EagerRunner(directory), judge, F32)


@pytest.mark.parametrize("kind", ["gqa", "mha", "head_dim"])
def test_fused_attention_equals_transformers(judged: Judged, kind: str) -> None:
    directory, judge = judged(kind, "f32")
    check_walks(EagerRunner(directory, form="fused"), judge, F32)


@pytest.mark.parametrize("chunk", [16, 32, 48])
@pytest.mark.parametrize("kind", ["gqa", "yarn"])
def test_chunked_prefill_equals_transformers(judged: Judged, kind: str, chunk: int) -> None:
    """C02, E17: pages of the chunk and pages of the table are independent sizes."""
    directory, judge = judged(kind, "f32")
    check_walks(EagerRunner(directory), judge, F32, chunk=chunk)


@pytest.mark.parametrize("tp", [1, 3])
def test_context_that_is_no_multiple_of_the_page(tmp_path: Path, tp: int) -> None:
    """C13: of 100 positions and pages of 16, the last page has four; all of them are usable."""
    config = tiny_config(max_position_embeddings=100)
    directory = write_tiny(tmp_path, config=config)
    tokens = token_ids(100)
    wanted = Judge(directory).logits(tokens)
    runner = EagerRunner(directory, tp=tp)
    assert runner.max_model_len == 100
    for prompt in (95, 96, 97, 100):
        found = walk(runner, tokens, prompt)
        tolerance = F32 * float(np.abs(wanted).max())
        assert_close(found, wanted[prompt - 1 :], tolerance, f"{prompt} of 100 positions")


@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        *(("gqa", tp) for tp in (2, 3)),  # 2 kv heads: cut evenly, then replicated
        *(("nine_three", tp) for tp in (2, 3, 5, 8)),  # B03: 3 kv heads, also on 2 ranks
        *(("eight_two", tp) for tp in (4, 8)),  # B01
        *(("vocab_257", tp) for tp in (2, 4, 8)),  # B05
        ("biases", 2),  # B08
        ("biases", 3),
        ("tied", 2),
        ("tied", 3),
        ("head_dim", 2),  # A05
        ("mqa", 3),
    ],
)
def test_every_tp_equals_transformers(judged: Judged, kind: str, tp: int) -> None:
    """B01, B03, B05, B08: whole kv heads, uneven shares, biases once."""
    directory, judge = judged(kind, "f32")
    check_walks(EagerRunner(directory, tp=tp), judge, F32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("form", "narrow_operands", "share"),
    [("matmul", False, BF16), ("fused", True, BF16_NARROW)],
    ids=["packed", "plain"],
)
def test_bf16_stays_near_transformers(
    judged: Judged, kind: str, form: AttentionForm, narrow_operands: bool, share: float
) -> None:
    """bf16 weights are the judge's own; what is rounded besides is the KV cache, and in the second
    form every operand of a product."""
    directory, judge = judged(kind, "bf16")
    runner = EagerRunner(directory, dtype="bf16", form=form, narrow_operands=narrow_operands)
    check_walks(runner, judge, share)


@pytest.mark.parametrize(("dtype", "share"), [("f32", F32), ("bf16", BF16)])
@pytest.mark.parametrize("kind", ["gqa", "tied", "biases", "llama3"])
def test_greedy_tokens_equal_transformers(
    judged: Judged, kind: str, dtype: str, share: float
) -> None:
    """Greedy continuations are the same text, up to a near-tie of the best two."""
    directory, judge = judged(kind, dtype)
    runner = EagerRunner(directory, dtype=dtype)
    for length in (1, 16, 31):
        prompt = token_ids(length, runner.vocab_size, seed=length)
        wanted, gaps = judge.greedy(prompt, 8)
        tolerance = share * float(np.abs(judge.logits(prompt)).max())
        (found,) = generate(runner, [prompt], 8)
        assert_same_choices(found, wanted, gaps, tolerance)


def test_bf16_checkpoint_as_f32_is_exact(judged: Judged) -> None:
    """A27: widening loses nothing, so a bf16 checkpoint compiled as f32 is on the f32 rung."""
    directory, judge = judged("gqa", "bf16")
    check_walks(EagerRunner(directory, dtype="f32"), judge, F32)


def test_ladder_can_fail(judged: Judged) -> None:
    """One row of one weight half as large again does not pass the bf16 rung, and weights that were
    rounded to bf16 do not pass the f32 rung."""
    directory, judge = judged("gqa", "f32")
    runner = EagerRunner(directory)
    weight = runner.model.parameters["blk.1.attn_v.weight"]
    original = weight.clone()
    weight[3] *= 1.5
    with pytest.raises(AssertionError, match="logits differ"):
        check_walks(runner, judge, BF16)
    weight.copy_(original.bfloat16().float())
    with pytest.raises(AssertionError, match="logits differ"):
        check_walks(runner, judge, F32)
