"""compile/workspace_estimate.py: near what modules of published shapes were found to allocate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shark_llm.compile.workspace import PREFILL_TOKENS
from shark_llm.compile.workspace_estimate import ModuleShape, estimate_workspace
from shark_llm.engine.settings import EngineSettings
from shark_llm.model.config import ModelConfig, config_from_hf
from shark_llm.model.llama import AttentionForm
from shark_llm.sharding.plan import plan_ranks

CONFIGS = Path(__file__).parents[1] / "published_configs"
LLAMA_8B, SMOLLM2 = "meta-llama--Llama-3.1-8B", "HuggingFaceTB--SmolLM2-135M"


def config(name: str) -> ModelConfig:
    return config_from_hf(json.loads((CONFIGS / f"{name}.json").read_text()))


def estimate(
    name: str,
    tp: int,
    form: AttentionForm,
    step: int,
    context: int,
    dtype: str = "bf16",
    page_size: int = 16,
) -> int:
    of = config(name)
    module = ModuleShape(attention_form=form, prefill_tokens=step, page_size=page_size)
    return max(
        estimate_workspace(of, rank, tp=tp, dtype=dtype, context_tokens=context, module=module)
        for rank in plan_ranks(of, tp)
    )


def test_a_step_is_what_a_server_takes_by_default() -> None:
    assert EngineSettings.max_num_batched_tokens == PREFILL_TOKENS


MEASURED = [
    (LLAMA_8B, 1, "fused", 2048, 8192, "bf16", 1004),
    (LLAMA_8B, 1, "fused", 2048, 131072, "bf16", 9813),
    (LLAMA_8B, 2, "fused", 512, 8192, "bf16", 215),
    (LLAMA_8B, 2, "fused", 2048, 8192, "bf16", 831),
    (LLAMA_8B, 2, "fused", 2048, 131072, "bf16", 5340),
    (LLAMA_8B, 8, "fused", 512, 8192, "bf16", 463),
    (LLAMA_8B, 8, "fused", 2048, 8192, "bf16", 1788),
    (LLAMA_8B, 8, "fused", 2048, 131072, "bf16", 3361),
    (LLAMA_8B, 1, "matmul", 512, 8192, "bf16", 157),
    (LLAMA_8B, 2, "matmul", 2048, 131072, "bf16", 547),
    (SMOLLM2, 1, "matmul", 128, 2048, "bf16", 5.0),
    (SMOLLM2, 2, "matmul", 512, 8192, "bf16", 20),
    (SMOLLM2, 3, "matmul", 2048, 131072, "bf16", 103),
]
"""Megabytes of the fullest rank as `module_workspace` read them from modules of 2 to 4 layers, with
all default entry points, for gfx942 and for CPUs (IREE 3.13)."""


@pytest.mark.parametrize(("name", "tp", "form", "step", "context", "dtype", "megabytes"), MEASURED)
def test_it_is_near_what_was_measured(
    name: str,
    tp: int,
    form: AttentionForm,
    step: int,
    context: int,
    dtype: str,
    megabytes: float,
) -> None:
    assert 0.9 < estimate(name, tp, form, step, context, dtype) / (megabytes * 1e6) < 1.5


@pytest.mark.parametrize(
    ("name", "tp", "megabytes"), [(LLAMA_8B, 1, 1969), (SMOLLM2, 1, 511), (SMOLLM2, 2, 342)]
)
def test_it_is_near_where_pages_are_gathered(name: str, tp: int, megabytes: int) -> None:
    """A CPU with pages of 4 tokens, measured in the same way: steps of 512 at a context of 8192."""
    estimated = estimate(name, tp, "matmul", 512, 8192, page_size=4)
    assert 0.9 < estimated / (megabytes * 1e6) < 1.5


def test_longer_contexts_and_steps_need_more() -> None:
    sizes = [estimate(LLAMA_8B, 2, "fused", step, 131072) for step in (512, 1024, 2048)]
    assert sizes == sorted(set(sizes))
    contexts = (512, 4096, 131072)
    sizes = [estimate(LLAMA_8B, 2, "matmul", 512, each, page_size=4) for each in contexts]
    assert sizes == sorted(set(sizes))


def test_where_pages_are_read_in_place_the_context_costs_nothing() -> None:
    assert len({estimate(LLAMA_8B, 2, "matmul", 512, each) for each in (512, 131072)}) == 1
