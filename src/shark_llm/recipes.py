"""Recipes: settings for published models, one TOML file each, for `shark-compile --recipe NAME`.

    recipes/llama-3.1-8b.toml

    title = "Llama 3.1 8B"
    model = "meta-llama/Llama-3.1-8B"      # what --hf-model would be
    targets = ["gfx942", "gfx950"]         # the first is the default
    tp_range = [1, 8]                      # first and last that the targets have memory for
    tp = 1                                 # the default
    dtype = "bf16"
    page_size = 16
    batch_sizes_prefill = [1, 4]
    batch_sizes_decode = [1, 4, 8]
    max_model_len = 131072

    [[checked]]                            # beyond planning; what no such row names is planned only
    target = "gfx942"
    tp = [8]
    how = "compiled full size"             # or "run on CPU"

In a checkout they lie in recipes/ and are read from there; a wheel installs them as the data files
share/shark-llm/recipes/. A path to a TOML file of one's own is a recipe's name too.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shark_llm.errors import UsageError

DISTRIBUTION = "shark-llm"
INSTALLED = PurePosixPath("share/shark-llm/recipes")
MAX_TP = 8

Tp = Annotated[int, Field(ge=1, le=MAX_TP)]
Positive = Annotated[int, Field(ge=1)]
Check = Literal["run on CPU", "compiled full size", "planned only"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Checked(_Strict):
    """What was done beyond planning, for some tp of one target."""

    target: str
    tp: tuple[Tp, ...] = Field(min_length=1)
    how: Literal["run on CPU", "compiled full size"]


class Recipe(_Strict):
    """The content of a recipe's file; the module docstring explains the fields."""

    title: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    targets: tuple[str, ...] = Field(min_length=1)
    tp_range: tuple[Tp, Tp]
    tp: Tp
    dtype: Literal["bf16", "f16", "f32"]
    page_size: Positive
    batch_sizes_prefill: tuple[Positive, ...] = Field(min_length=1)
    batch_sizes_decode: tuple[Positive, ...] = Field(min_length=1)
    max_model_len: Positive
    checked: tuple[Checked, ...] = ()

    @property
    def tps(self) -> range:
        """All of `tp_range`."""
        return range(self.tp_range[0], self.tp_range[1] + 1)

    def how_checked(self, target: str, tp: int) -> Check:
        """How far the model has been taken with this target and tp."""
        rows = (row for row in self.checked if row.target == target and tp in row.tp)
        return next((row.how for row in rows), "planned only")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.tp not in self.tps:
            raise ValueError(f"tp = {self.tp} is not in tp_range = {list(self.tp_range)}")
        for name in ("batch_sizes_prefill", "batch_sizes_decode", "targets"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names a value twice")
        seen = set()
        for row in self.checked:
            for tp in row.tp:
                if row.target not in self.targets or tp not in self.tps:
                    raise ValueError(
                        f"checked: {row.target} at tp {tp} is none of targets and tp_range"
                    )
                if (row.target, tp) in seen:
                    raise ValueError(f"checked: {row.target} at tp {tp} stands there twice")
                seen.add((row.target, tp))
        return self


def list_recipes() -> tuple[str, ...]:
    """The names of all recipes, sizes in ascending order. Raises UsageError when there are none."""
    return tuple(_files())


def load_recipe(name: str) -> Recipe:
    """Read the recipe `name`, or the file that it names with a path or as `*.toml`.

    Raises UsageError for one that is unknown, unreadable, or not what a recipe must be.
    """
    if "/" in name or name.endswith(".toml"):
        return read_recipe(Path(name).expanduser())
    files = _files()
    if name not in files:
        raise UsageError(f"no such recipe: {name!r}; choose from {', '.join(files)}")
    return read_recipe(files[name])


def read_recipe(path: Path) -> Recipe:
    """Parse and check one file. Raises UsageError, which names the file and the field."""
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}): check the path") from error
    except ValueError as error:  # no UTF-8, or no TOML
        raise UsageError(f"{path}: is no TOML ({error}): correct it there") from error
    try:
        # By way of JSON, whose arrays may be tuples: TOML knows no tuples either.
        return Recipe.model_validate_json(json.dumps(fields, default=str), strict=True)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or 'recipe'}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise UsageError(f"{path}: {'; '.join(faults)}: correct it there") from error


def _files() -> dict[str, Path]:
    """Name -> file of every recipe."""
    checkout = _checkout()
    paths = _installed() if checkout is None else list(checkout.glob("*.toml"))
    if not paths:
        raise UsageError(
            "this installation has no recipes: install shark-llm again, or name a TOML file"
        )
    return {path.stem: path for path in sorted(paths, key=lambda path: _natural(path.stem))}


def _checkout() -> Path | None:
    """recipes/ of the checkout that this module lies in; None: it is installed."""
    source = Path(__file__).resolve().parents[1]
    return source.parent / "recipes" if source.name == "src" else None


def _installed() -> list[Path]:
    """The recipes among the files of the installed distribution, wherever its data went."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [
        Path(str(file.locate())).resolve()
        for file in files
        if file.suffix == ".toml" and file.parent.parts[-3:] == INSTALLED.parts
    ]


def _natural(name: str) -> list[tuple[int, float | str]]:
    """Sorts 135m before 1.7b, and 8b before 70b."""
    key: list[tuple[int, float | str]] = []
    for part in re.split(r"(\d+(?:\.\d+)?[mb]?)", name):
        if part[:1].isdigit():
            unit = {"m": 1e6, "b": 1e9}.get(part[-1], 1.0)
            key.append((0, float(part.rstrip("mb")) * unit))
        else:
            key.append((1, part))
    return key
