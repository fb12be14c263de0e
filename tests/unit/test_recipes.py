"""Recipes: a strict schema, and every one of them plans and fits where it says it does."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from shark_llm import recipes
from shark_llm.compile.targets import get_target, target_names
from shark_llm.errors import UsageError
from shark_llm.export.signatures import ExportSettings
from shark_llm.model.config import ModelConfig, config_from_hf
from shark_llm.planner import check_capacity, choose_max_model_len, device_memory
from shark_llm.recipes import Recipe, list_recipes, load_recipe, read_recipe
from shark_llm.sharding.plan import MAX_TP, plan_parameters, supported_tps

ROOT = Path(__file__).parents[2]
NAMES = list_recipes()


def config_of(recipe: Recipe) -> ModelConfig:
    """The published shape."""
    path = ROOT / "tests" / "published_configs" / f"{recipe.model.replace('/', '--')}.json"
    return config_from_hf(json.loads(path.read_text()))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_can_be_built(name: str) -> None:
    """Its targets are there, its settings are taken, and every tp plans."""
    recipe = load_recipe(name)
    config = config_of(recipe)
    assert set(recipe.targets) <= set(target_names())
    assert choose_max_model_len(recipe.max_model_len, config) == recipe.max_model_len
    ExportSettings(
        page_size=recipe.page_size,
        batch_sizes_prefill=recipe.batch_sizes_prefill,
        batch_sizes_decode=recipe.batch_sizes_decode,
        dtype=recipe.dtype,
    )
    assert set(recipe.tps) <= set(supported_tps(config))
    for tp in recipe.tps:
        plan_parameters(config, tp)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_its_gpus(name: str) -> None:
    recipe = load_recipe(name)
    gpus = [target for target in recipe.targets if get_target(target).memory_bytes is not None]
    assert gpus
    for target in gpus:
        for tp in recipe.tps:
            check_capacity(
                config_of(recipe),
                device_memory(get_target(target)),
                tp=tp,
                dtype=recipe.dtype,
                max_model_len=recipe.max_model_len,
            )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_keeps_the_models_own_dtype(name: str) -> None:
    recipe = load_recipe(name)
    assert config_of(recipe).torch_dtype == {"bf16": "bfloat16", "f16": "float16"}[recipe.dtype]


def test_every_model_of_the_support_table_has_one() -> None:
    models = {load_recipe(name).model for name in NAMES}
    assert len(models) == len(NAMES)
    for family in (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-405B",
        "meta-llama/Llama-3.2-1B",
        "meta-llama/Llama-3.2-3B",
        "HuggingFaceTB/SmolLM2-135M",
        "HuggingFaceTB/SmolLM2-360M",
        "HuggingFaceTB/SmolLM2-1.7B",
    ):
        assert {family, f"{family}-Instruct"} <= models
    for name in ("llama-2-7b", "llama-3.3-70b-instruct", "mistral-7b-v0.3", "codellama-34b"):
        assert name in NAMES
    for name in ("mistral-nemo-base-2407", "tinyllama-1.1b-chat", "yi-6b"):
        assert name in NAMES


def test_they_are_listed_by_size() -> None:
    llama = [name for name in NAMES if name.startswith(("llama-3.1", "smollm2"))]
    assert llama == [
        "llama-3.1-8b",
        "llama-3.1-8b-instruct",
        "llama-3.1-70b",
        "llama-3.1-70b-instruct",
        "llama-3.1-405b",
        "llama-3.1-405b-instruct",
        "smollm2-135m",
        "smollm2-135m-instruct",
        "smollm2-360m",
        "smollm2-360m-instruct",
        "smollm2-1.7b",
        "smollm2-1.7b-instruct",
    ]


def test_how_it_was_checked(tmp_path: Path) -> None:
    text = (ROOT / "recipes" / "smollm2-135m-instruct.toml").read_text().split("[[checked]]")[0]
    rows = '[[checked]]\ntarget = "host"\ntp = [1, 2]\nhow = "run on CPU"\n'
    path = tmp_path / "mine.toml"
    path.write_text(text + rows)
    recipe = load_recipe(str(path))
    assert recipe.how_checked("host", 2) == "run on CPU"
    assert recipe.how_checked("host", 3) == recipe.how_checked("gfx942", 1) == "planned only"


GOOD = (ROOT / "recipes" / "llama-3.1-405b.toml").read_text()
ROW = '[[checked]]\ntarget = "{}"\ntp = [{}]\nhow = "{}"\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('dtype = "bf16"', 'dtype = "int3"', "dtype: Input should be 'bf16', 'f16' or 'f32'"),
        ('dtype = "bf16"', "", "dtype: Field required"),
        ("page_size", "pagesize", "pagesize: Extra inputs are not permitted"),
        ("tp = 8", "tp = 4", r"tp = 4 is not in tp_range = \[5, 8\]"),
        ("tp = 8", 'tp = "8"', "tp: Input should be a valid integer"),
        ("tp = 8", "tp = 9", "tp: Input should be less than or equal to 8"),
        ("[5, 8]", "[5, 6, 8]", "tp_range"),
        ("[5, 8]", "[8, 5]", "tp = 8 is not in tp_range"),
        ("[1, 4]", "[4, 4]", "batch_sizes_prefill names a value twice"),
        ("[1, 4]", "[]", "batch_sizes_prefill: .* at least 1 item"),
        ("131072", "0", "max_model_len: Input should be greater than or equal to 1"),
        ("meta-llama/", "", "model: String should match"),
        ("$", ROW.format("gfx90a", 8, "run on CPU"), "gfx90a at tp 8 is none of targets"),
        ("$", ROW.format("gfx942", 4, "run on CPU"), "gfx942 at tp 4 is none of targets and tp_r"),
        ("$", ROW.format("gfx942", 8, "looked at"), "checked.1.how: Input should be 'run on CPU'"),
        ("$", ROW.format("gfx942", "8, 8", "run on CPU"), "gfx942 at tp 8 stands there twice"),
        ("title", "title title", "is no TOML"),
    ],
)
def test_a_faulty_recipe_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "faulty.toml"
    path.write_text(GOOD + new if old == "$" else GOOD.replace(old, new, 1))
    with pytest.raises(UsageError, match=message) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(str(path))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no such recipe: 'llama-9'; choose from .*yi-6b"):
        load_recipe("llama-9")
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read \(No such file"):
        load_recipe("none.toml")


def test_an_installed_package_finds_its_data_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the wheel puts them is read from the distribution's own list of files."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["shared-data"] == {"recipes": str(recipes.INSTALLED)}
    data = tmp_path / "share" / "shark-llm" / "recipes"
    data.mkdir(parents=True)
    (data / "llama-3.1-405b.toml").write_text(GOOD)
    info = tmp_path / "lib" / "site" / "shark_llm-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shark-llm\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "../../share/shark-llm/recipes/llama-3.1-405b.toml,,\nshark_llm/other.toml,,\n"
    )
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.setattr(recipes, "_checkout", lambda: None)
    assert list_recipes() == ("llama-3.1-405b",)
    assert load_recipe("llama-3.1-405b").tps == range(5, MAX_TP + 1)
    (data / "llama-3.1-405b.toml").unlink()
    (info / "RECORD").write_text("")
    with pytest.raises(UsageError, match="has no recipes: install shark-llm again"):
        list_recipes()
