"""The golden check on real modules: it passes, and it sees what is wrong in archives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiled import running
from shark_llm.artifacts.bundle import Bundle
from shark_llm.artifacts.irpa import ArchiveReader
from shark_llm.artifacts.manifest import GoldenReport
from shark_llm.checkpoint.open import open_checkpoint
from shark_llm.compile.targets import get_target
from shark_llm.errors import VerificationError
from shark_llm.golden import check_golden, golden_pages, read_parameters
from shark_llm.sharding.apply import TORCH_DTYPES

CompiledModel = Callable[[str], Any]  # of conftest.py: name -> Compiled


def check(bundle: Bundle, checkpoint_dir: Path, *, corrupt: str | None = None) -> GoldenReport:
    """The check of a bundle; `corrupt` names a parameter to change on the eager side."""
    checkpoint, manifest = open_checkpoint(checkpoint_dir), bundle.manifest
    quantized = manifest.weights_dtype is not None
    parameters = read_parameters(checkpoint, TORCH_DTYPES[manifest.dtype], quantized=quantized)
    if corrupt:
        parameters[corrupt].view(-1)[5] += 2.0
    tokens = (golden_pages(manifest) - 1) * manifest.page_size
    with running(bundle, tokens=tokens) as runner:
        return check_golden(
            runner,
            manifest,
            checkpoint.config,
            parameters,
            form=get_target("host", quantized=quantized).linear_form,
        )


@pytest.mark.parametrize("name", ["t0", "wide", "tp2", "tp3", "tp8", "int8", "int8_tp3"])
def test_published_bundle_passed_and_passes_again(compiled: CompiledModel, name: str) -> None:
    """Far below the tolerance: it has room for rounding, not for mistakes."""
    made = compiled(name)
    report = check(made.bundle, made.checkpoint)
    assert made.bundle.manifest.golden is not None
    for found in (report, made.bundle.manifest.golden):
        assert found.max_abs_error <= found.tolerance / 10


def test_weight_changed_on_the_eager_side_is_found(compiled: CompiledModel) -> None:
    made = compiled("t0")
    with pytest.raises(VerificationError, match="logits differ"):
        check(made.bundle, made.checkpoint, corrupt="blk.1.attn_v.weight")


@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_weight_changed_in_the_archive_is_found(
    tmp_path: Path, compiled: CompiledModel, value: float
) -> None:
    """C14: one row of one weight, another number or NaN, in the file that the module maps."""
    made = compiled("t0")
    copy = tmp_path / "bundle"
    shutil.copytree(made.bundle.path, copy)
    reader = ArchiveReader(copy / "model.irpa")
    original = reader.read("blk.0.ffn_up.weight").copy()  # it maps the file
    archive = (copy / "model.irpa").read_bytes()
    at = archive.index(original.tobytes())
    changed = original.copy()
    changed[3, :] = value
    data = archive[:at] + changed.tobytes() + archive[at + changed.nbytes :]
    (copy / "model.irpa").write_bytes(data)
    assert not np.array_equal(
        ArchiveReader(copy / "model.irpa").read("blk.0.ffn_up.weight"), original
    )
    with pytest.raises(VerificationError, match="golden check, prefill"):
        check(replace(made.bundle, path=copy), made.checkpoint)
