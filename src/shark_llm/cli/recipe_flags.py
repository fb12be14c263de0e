"""--recipe: the build settings that a recipe stands for, and where a user has left it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shark_llm.build_plan import BuildSettings
from shark_llm.recipes import Recipe


def recipe_settings(recipe: Recipe) -> BuildSettings:
    """What is built when no other flag is given; where to is for the user to say."""
    return BuildSettings(
        model=recipe.model,
        out_dir=Path(),
        target=recipe.targets[0],
        tp=recipe.tp,
        dtype=recipe.dtype,
        page_size=recipe.page_size,
        batch_sizes_prefill=recipe.batch_sizes_prefill,
        batch_sizes_decode=recipe.batch_sizes_decode,
        max_model_len=recipe.max_model_len,
    )


def departures(recipe: Recipe, settings: BuildSettings) -> Iterator[str]:
    """Notes on flags with which the recipe says nothing of what will come out."""
    if settings.target not in recipe.targets:
        yield f"the recipe is for {', '.join(recipe.targets)}, not for {settings.target}"
    if settings.tp not in recipe.tps:
        first, last = recipe.tp_range
        yield f"the recipe is for tp {first} to {last}, not for tp {settings.tp}"
