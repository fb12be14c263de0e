"""docs/sharding.md: its tables and figures are those of the plan and the planner."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shark_llm.compile.workspace_estimate import ModuleShape
from shark_llm.model.config import ModelConfig, config_from_hf
from shark_llm.planner import GIB, GPUS, plan_memory
from shark_llm.recipes import list_recipes, load_recipe
from shark_llm.sharding.plan import plan_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")


def config(name: str) -> ModelConfig:
    path = ROOT / "tests" / "published_configs" / f"{name}.json"
    return config_from_hf(json.loads(path.read_text()))


@pytest.mark.parametrize("tp", range(1, 9))
def test_which_rank_of_smollm2_holds_what(tp: int) -> None:
    """B03: 9 query and 3 kv heads at every tp."""
    ranks = plan_ranks(config("HuggingFaceTB--SmolLM2-135M"), tp)
    cells = (
        str(tp),
        " ".join(str(rank.num_heads) for rank in ranks),
        " ".join("+".join(map(str, rank.kv_heads)) for rank in ranks),
        " ".join(str(rank.intermediate_size) for rank in ranks),
        " ".join(str(rank.vocab_size) for rank in ranks),
    )
    assert f"| {' | '.join(cells)} |\n" in PAGE


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_least_tp_of_405b(gpu: str, dtype: str) -> None:
    bounds = [
        plan_memory(
            config("meta-llama--Llama-3.1-405B"),
            memory_bytes=GPUS[gpu],
            dtype=dtype,
            kv_dtype=dtype,
            max_model_len=length,
        ).lower_bound
        for length in (2048, 8192, 131072)
    ]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {gpu} ("))
    assert f"({GPUS[gpu] // GIB} GiB" in row
    assert [cell.strip() for cell in row.split("|")[2:5]] == [str(b or "none") for b in bounds]


def test_the_plan_of_405b() -> None:
    """The printed table, and the arithmetic below it."""
    plan = plan_memory(
        config("meta-llama--Llama-3.1-405B"),
        memory_bytes=GPUS["mi300x"],
        dtype="bf16",
        kv_dtype="bf16",
    )
    for split in plan.splits:
        rank = split.ranks[0]
        row = (
            f"{split.tp:2}  {f'{rank.weight_bytes / GIB:.2f} GiB':>10}  "
            f"{f'{rank.kv_bytes_per_token / 1024:g} KiB':>12}  "
            f"{f'{rank.workspace_bytes / GIB:.2f} GiB':>16}  {split.kv_tokens:>14}  "
            f"{'yes' if split.fits else 'no':>4}"
        )
        assert f"{row}\n" in PAGE
    four, five, eight = (plan.splits[tp - 1] for tp in (4, 5, 8))
    assert f"{four.longest_len:,} tokens" in PAGE
    assert f"{five.kv_tokens:,} tokens" in PAGE
    for split in (four, five):
        rank = split.ranks[0]
        left = plan.memory_bytes - 2 * GIB - rank.weight_bytes - rank.workspace_bytes
        assert f"{left / GIB:.2f} GiB\n" in PAGE
    assert f"{eight.kv_tokens:,} tokens" in PAGE


@pytest.mark.parametrize("step", [512, 2048])
def test_the_workspace_of_8b(step: int) -> None:
    cells = [f"steps of {step:,} tokens"]
    for length in (8192, 131072):
        (split,) = plan_memory(
            config("meta-llama--Llama-3.1-8B"),
            memory_bytes=GPUS["mi300x"],
            dtype="bf16",
            kv_dtype="bf16",
            tps=[2],
            max_model_len=length,
            module=ModuleShape(prefill_tokens=step),
        ).splits
        cells.append(f"{split.ranks[0].workspace_bytes / GIB:.1f} GiB")
    assert f"| {' | '.join(cells)} |\n" in PAGE


def test_the_recipes_named_are_there() -> None:
    recipes = set(re.findall(r"--recipe ([\w.-]+)", PAGE))
    assert recipes
    assert recipes <= set(list_recipes())


def test_the_support_table_has_every_recipe() -> None:
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    for name in list_recipes():
        assert f"| `{load_recipe(name).model}` | `{name}` |" in page
