"""scripts/equality on tiny models: real servers at several tp, held to transformers over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import equality
from benchmarks.servers import ServerError

CompiledModel = Callable[[str], Any]  # of conftest.py: name -> Compiled
LENGTHS = (1, 15, 16, 17, 40)
MAX_TOKENS = 20


@pytest.mark.parametrize("name", ["t0", "tp2", "tp3", "tp8"])
def test_served_answers_are_transformers_own(compiled: CompiledModel, name: str) -> None:
    """Alone, and in a mixed batch with two sampled requests of one seed, which agree (B13)."""
    made = compiled(name)
    prompts = equality.random_prompts(made.bundle.manifest.vocab_size, LENGTHS)
    judge = equality.Judge(made.checkpoint, "f32")
    with equality.serving(made.bundle.path) as port:
        for way in (equality.alone, equality.mixed):
            answers = way(port, prompts, MAX_TOKENS)
            verdict = judge.judge(answers)
            assert [answer.prompt for answer in answers] == [tuple(prompt) for prompt in prompts]
            assert verdict.tokens == len(LENGTHS) * MAX_TOKENS
            assert verdict.wrong == []
            assert 0 < verdict.error < 1e-5, "tiny models have small activations"


def test_the_bf16_judge_rounds_weights_and_no_angles(compiled: CompiledModel) -> None:
    """C09: rounded with Module.to, the judge's own rotary frequencies were off by up to 0.4 %."""
    checkpoint = compiled("t0").checkpoint
    exact, rounded = (equality.Judge(checkpoint, dtype).model for dtype in ("f32", "bf16"))
    for name, buffer in exact.named_buffers():
        assert torch.equal(rounded.get_buffer(name), buffer), name
    changed = 0
    for name, weight in exact.named_parameters():
        assert torch.equal(rounded.get_parameter(name), weight.bfloat16().float()), name
        changed += not torch.equal(rounded.get_parameter(name), weight)
    assert changed > 0


def test_the_judge_sees_another_token_and_another_logit(compiled: CompiledModel) -> None:
    """What the script must find: a less likely token, and log-probabilities that are a bit off."""
    made = compiled("tp2")
    (prompt,) = equality.random_prompts(made.bundle.manifest.vocab_size, (17,))
    judge = equality.Judge(made.checkpoint, "f32")
    with equality.serving(made.bundle.path) as port:
        answer = equality.ask(port, prompt, 4)
        with pytest.raises(ServerError, match="HTTP 400"):
            equality.ask(port, [], 4)
    assert judge.judge([answer]).wrong == []
    second = sorted(answer.top[2], key=answer.top[2].__getitem__)[-2]
    other = replace(answer, tokens=(*answer.tokens[:2], second, answer.tokens[3]))
    (line, *_) = judge.judge([other]).wrong
    assert line.startswith(f"answer 0, token 2: {second} is ")
    shifted = [{token: value + 0.1 for token, value in top.items()} for top in answer.top]
    assert len(judge.judge([replace(answer, top=tuple(shifted))]).wrong) == 4
