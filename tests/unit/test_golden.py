"""The golden check itself: what it runs, and that it fails when it must.

The module's place is taken by a second eager model, which can be made wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bundles import sample_manifest
from ladder import EagerRunner, write_kind
from shark_llm.artifacts.manifest import GoldenReport, Manifest
from shark_llm.compile.targets import get_target
from shark_llm.errors import VerificationError
from shark_llm.export.signatures import ExportSettings, entry_points
from shark_llm.golden import check_golden, golden_pages, golden_steps
from shark_llm.runtime.module import IreeRunner
from shark_llm.runtime.runner import Phase, Row, StepOutput
from shark_llm.sharding.plan import plan_parameters


def manifest(tp: int = 1, **changes: Any) -> Manifest:
    settings = ExportSettings(batch_sizes_prefill=(1, 4), batch_sizes_decode=(1, 4))
    return sample_manifest(tp=tp, **({"entry_points": entry_points(settings, 256)} | changes))


class Module(EagerRunner):
    """Stands for a compiled module. `change` may alter what it returns."""

    def __init__(
        self,
        directory: Path,
        change: Callable[[npt.NDArray[np.float32], int], None] = lambda logits, call: None,
        **options: Any,
    ) -> None:
        super().__init__(directory, **options)
        self.change = change
        self.calls: list[tuple[Phase, Sequence[Row]]] = []

    def poison(self) -> None:
        self.fill(float("nan"))

    def forward(self, phase: Phase, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        self.calls.append((phase, rows))
        logits = super().forward(phase, rows).copy()
        self.change(logits, len(self.calls))
        return logits


@pytest.fixture(scope="module")
def t0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kind(tmp_path_factory.mktemp("t0"), "gqa")


def check(module: Module, directory: Path, made: Manifest, dtype: str = "f32") -> GoldenReport:
    judge = EagerRunner(directory, dtype=dtype).model
    return check_golden(
        cast(IreeRunner, module),
        made,
        judge.config,
        judge.parameters,
        form=get_target("x86-64-v3").linear_form,
    )


def test_equal_models_pass(t0: Path) -> None:
    """Also with the weights cut for two ranks: the sums differ, the logits do not."""
    for tp in (1, 2):
        made = manifest(tp=tp)
        report = check(Module(t0, num_pages=golden_pages(made)), t0, made)
        assert report.max_abs_error <= report.tolerance / 10
        assert report.decode_steps == 5
        assert report.prompt_tokens > 32


def test_steps_cover_what_goes_wrong_in_the_field(t0: Path) -> None:
    """A prefill that ends inside a page, decode over the boundary, an offset, unused rows."""
    steps = list(golden_steps(manifest()))
    decodes = [step for step in steps if step.phase == "decode"]
    starts = [step.rows[0].start for step in decodes[:4]]
    assert starts == [30, 31, 32, 33]
    assert [len(step.rows[0].pages) for step in decodes[:4]] == [2, 2, 3, 3]
    assert any(step.rows[0].start for step in steps if step.phase == "prefill")
    assert {step.phase for step in steps if len(step.rows) == 2} == {"prefill", "decode"}
    assert all(0 not in row.pages for step in steps for row in step.rows)


@pytest.mark.parametrize("max_model_len", [1, 2, 4, 5, 16, 17, 31, 32, 33, 512])
@pytest.mark.parametrize("page_size", [2, 16, 64])
def test_steps_fit_any_model_length(max_model_len: int, page_size: int) -> None:
    made = manifest(max_model_len=max_model_len, page_size=page_size)
    for step in golden_steps(made):
        for row in step.rows:
            end = row.start + len(row.tokens)
            assert row.tokens
            assert end <= max_model_len
            assert -(-end // page_size) <= len(row.pages) < golden_pages(made)
            if step.phase == "prefill":
                assert row.start % page_size == 0


@pytest.mark.parametrize("call", range(1, 9))
def test_one_wrong_logit_in_any_step_is_found(t0: Path, call: int) -> None:
    def change(logits: npt.NDArray[np.float32], at: int) -> None:
        if at == call:
            logits[-1, 200] += 0.05

    with pytest.raises(VerificationError, match=r"logits differ by 0\.05"):
        check(Module(t0, change), t0, manifest())


def test_module_that_chooses_another_token_fails(t0: Path) -> None:
    """Greedy tokens come from the device: right logits are not enough."""

    class Wrong(Module):
        def run(self, phase: Phase, rows: Sequence[Row]) -> StepOutput:
            output = super().run(phase, rows)
            return replace(output, best_tokens=(output.best_tokens + 1) % self.vocab_size)

    with pytest.raises(VerificationError, match="best tokens"):
        check(Wrong(t0), t0, manifest())


def test_module_that_adds_up_something_else_fails(t0: Path) -> None:
    """top_p draws from the device's sums: a block that is left out would never be drawn."""

    class Wrong(Module):
        def run(self, phase: Phase, rows: Sequence[Row]) -> StepOutput:
            output = super().run(phase, rows)
            return replace(output, read_sums=lambda scales: 0.99 * output.read_sums(scales))

    with pytest.raises(VerificationError, match="the sums that sampling needs differ by"):
        check(Wrong(t0), t0, manifest())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_module_that_gives_nan_fails(t0: Path, value: float) -> None:
    """C14: a compiler's NaN is no small difference."""

    def change(logits: npt.NDArray[np.float32], call: int) -> None:
        logits[0, 7] = value

    with pytest.raises(VerificationError, match="golden check, prefill of 1 rows") as caught:
        check(Module(t0, change), t0, manifest())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output_norm.weight", "output.weight"]
)
def test_one_corrupt_weight_is_found(t0: Path, name: str) -> None:
    module = Module(t0)
    module.model.parameters[name].view(-1)[9] += 2.0
    with pytest.raises(VerificationError):
        check(module, t0, manifest())


def test_module_that_reads_what_nobody_wrote_fails(t0: Path) -> None:
    """C06: the pool is poisoned, so an attention without its mask on values shows."""
    module = Module(t0)
    held = module.model.caches[0]

    def change(logits: npt.NDArray[np.float32], call: int) -> None:
        logits += held[1][-1].mean().item()  # a page that no step uses

    module.change = change
    with pytest.raises(VerificationError):
        check(module, t0, manifest())


def test_model_that_overflows_in_f16_gets_the_advice(tmp_path: Path) -> None:
    """Keys beyond 65504 are infinite in an f16 cache: that is no fault of the module."""
    directory = write_kind(tmp_path, "biases")
    judge = EagerRunner(directory, dtype="f16").model
    judge.parameters["blk.0.attn_k.bias"].fill_(60000.0)
    judge.parameters["blk.0.attn_k.weight"].mul_(30000.0)
    module = Module(directory, dtype="f16")
    with pytest.raises(VerificationError, match="overflows in f16; build it with --dtype bf16"):
        check_golden(
            cast(IreeRunner, module),
            manifest(dtype="f16", plan=plan_parameters(judge.config, 1)),
            judge.config,
            judge.parameters,
            form=get_target("x86-64-v3").linear_form,
        )
    assert torch.isfinite(judge.parameters["output.weight"]).all()
