"""The page docs/support.md: what recipes say of each model, and what the planner finds for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from shark_llm.model.config import ModelConfig, config_from_hf
from shark_llm.planner import GIB, GPUS, RESERVE_BYTES, plan_memory
from shark_llm.recipes import Recipe, list_recipes, load_recipe
from shark_llm.sharding.plan import supported_tps

CONFIGS = Path(__file__).parent.parent / "tests" / "published_configs"
GPU = "mi300x"
COLUMNS = (
    "model",
    "Hugging Face id",
    "recipe",
    "tp works",
    "tp fits MI300X",
    "precision",
    "context",
    "checked",
)


def support_page(notice: str) -> str:
    """The whole page; `notice` says who has written it."""
    memory = f"{GPUS[GPU] / GIB:.0f} GiB"
    lines = [
        "# Supported models",
        "",
        notice,
        "",
        "Any Llama or Mistral of the Hugging Face form compiles; these have a",
        "[recipe](sharding.md#recipes): `shark-compile --recipe NAME`.",
        "",
        "- **tp works**: the tensor parallel degrees that can split the model.",
        f"- **tp fits MI300X**: those at which every GPU of one node ({memory} each) holds its",
        "  part of the weights, one sequence of the full context, the estimated workspace and",
        f"  {RESERVE_BYTES / GIB:.0f} GiB that are kept free. "
        "`shark-compile plan` answers for other GPUs, lengths and batches.",
        "- **checked**: *run on CPU* means that the compiled module was compared with the model on",
        "  a CPU, with the real weights; *compiled full size* that the module of the published",
        "  shape was compiled, with dummy weights, and inspected; *planned only* that shapes and",
        "  memory were planned and no more. No GPU has run any of them here.",
        "",
        "Shapes are those of `tests/published_configs`; a build reads the model's own config.json.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    lines += [_row(name, load_recipe(name)) for name in list_recipes()]
    return "\n".join(lines) + "\n"


def _row(name: str, recipe: Recipe) -> str:
    config = _config(recipe)
    plan = plan_memory(
        config,
        memory_bytes=GPUS[GPU],
        dtype=recipe.dtype,
        kv_dtype=recipe.dtype,
        max_model_len=recipe.max_model_len,
    )
    cells = (
        recipe.title,
        f"`{recipe.model}`",
        f"`{name}`",
        _ranges(supported_tps(config)),
        _ranges(split.tp for split in plan.splits if split.fits),
        recipe.dtype,
        str(recipe.max_model_len),
        "; ".join(_checks(recipe)),
    )
    return f"| {' | '.join(cells)} |"


def _config(recipe: Recipe) -> ModelConfig:
    path = CONFIGS / f"{recipe.model.replace('/', '--')}.json"
    return config_from_hf(json.loads(path.read_text(encoding="utf-8")))


def _checks(recipe: Recipe) -> Iterator[str]:
    for row in recipe.checked:
        yield f"{row.how}: `{row.target}` tp {_ranges(row.tp)}"
    if not recipe.checked:
        yield "planned only"


def _ranges(values: Iterable[int]) -> str:
    """1-4, 8 for 1, 2, 3, 4, 8."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs) or "none"
