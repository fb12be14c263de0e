"""The three ways to say what shark-serve serves: exclusive, complete, in old and new spellings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shark_llm.cli import packages, serve
from shark_llm.cli.serve_model import ModelToBuild, PartPaths, choose_source
from shark_llm.errors import CompileError, DeviceError, UsageError

PARTS = ("tokenizer_json", "model_config", "vmfb", "parameters")


def choose(artifacts_dir: Path | None = None, **given: Any) -> Any:
    build = {name: value for name, value in given.items() if name not in PARTS}
    parts = {name: given.get(name) for name in PARTS}
    return choose_source(artifacts_dir=artifacts_dir, build=build, parts=parts)


def test_each_way_alone() -> None:
    assert choose(Path("d")) == Path("d")
    built = choose(model="org/name", tp=8, ensure=(), cache_dir=None)
    assert built == ModelToBuild(model="org/name", tp=8)
    parts = {name: Path(name) for name in PARTS[:3]} | {"parameters": (Path("a"),)}
    assert choose(**parts) == PartPaths(**parts)


@pytest.mark.parametrize(
    ("artifacts_dir", "given", "words"),
    [
        (Path("d"), {"model": "m"}, "--artifacts-dir and --model-path do not go together"),
        (Path("d"), {"tp": 2}, "--artifacts-dir and --tp do not go together"),
        (Path("d"), {"ensure": ("export",)}, "--artifacts-dir and an --ensure flag do not go"),
        (Path("d"), {"vmfb": Path("v")}, "--artifacts-dir and --vmfb do not go together"),
        (None, {"model": "m", "parameters": (Path("a"),)}, "--model-path and --parameters do not"),
        (None, {"tp": 2}, "--tp is for building, and there is no model"),
        (None, {"vmfb": Path("v")}, "--tokenizer-json, --model-config, --parameters missing"),
        (None, {}, "nothing to serve"),
        (None, {"cache_dir": Path("c")}, "nothing to serve"),
    ],
)
def test_mixes_and_halves_are_refused_by_name(
    artifacts_dir: Path | None, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        choose(artifacts_dir, **given)
    assert words in str(caught.value)


def test_a_cache_in_the_environment_goes_with_every_way() -> None:
    """SHARK_CACHE_DIR is for all commands of a machine."""
    assert choose(Path("d"), cache_dir=Path("c")) == Path("d")


OLD_SCRIPT = (
    "--tokenizer_json t/tokenizer.json --model_config c.json --vmfb m.vmfb "
    "--parameters m.irpa m.rank0.irpa m.rank1.irpa --device=hip --device_ids 0 1"
)


def test_the_older_stacks_command_line_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its scripts write it: underscores, and several values behind one flag."""
    asked: list[Any] = []
    monkeypatch.setattr(serve, "_run", lambda source, engine, **rest: asked.append((source, rest)))
    with pytest.raises(SystemExit) as caught:
        serve.main(OLD_SCRIPT.split())
    assert not caught.value.code
    ((source, rest),) = asked
    assert source == PartPaths(
        tokenizer_json=Path("t/tokenizer.json"),
        model_config=Path("c.json"),
        vmfb=Path("m.vmfb"),
        parameters=(Path("m.irpa"), Path("m.rank0.irpa"), Path("m.rank1.irpa")),
    )
    assert (rest["device"], rest["device_ids"]) == ("hip", (0, 1))


# --- building ------------------------------------------------------------------------------------


def test_the_command_that_builds(tmp_path: Path) -> None:
    """What is not said is left to shark-compile's own defaults; the token is not on the line."""
    model = ModelToBuild(
        model="org/name",
        tp=8,
        compile_target="gfx942",
        weights_dtype="int8",
        batch_sizes_decode=(1, 8),
        cache_dir=tmp_path,
        hf_token="hf_secret",
        ensure=("compile",),
    )
    assert model.argv() == [
        "--hf-model=org/name",
        f"--output-artifacts-dir={model.out_dir}",
        f"--cache-dir={tmp_path}",
        "--tp=8",
        "--compile-target=gfx942",
        "--weights-dtype=int8",
        "--batch-sizes-decode", "1", "8",
        "--quick-check",
        "--ensure-compile",
    ]  # fmt: skip
    assert model.out_dir.parent == tmp_path / "bundles" / "org--name"
    assert "hf_secret" not in repr(model)


def test_one_directory_for_each_way_to_build(tmp_path: Path) -> None:
    """Forcing a stage, a token or a spelled-out default is no other bundle."""

    def out_dir(model: str = "org/name", **fields: Any) -> Path:
        return ModelToBuild(model=model, cache_dir=tmp_path, **fields).out_dir

    same = [out_dir(), out_dir(tp=1, compile_target="host"), out_dir(ensure=("export",))]
    others = [out_dir(tp=2), out_dir(compile_target="gfx942"), out_dir(revision="v1")]
    others += [out_dir(weights_dtype="int8")]
    others += [out_dir(dtype="f32"), out_dir(batch_sizes_decode=(2,)), out_dir("org/other")]
    assert len(set(same)) == 1
    assert len({*same, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/name", "org/name"),
        ("https://huggingface.co/org/name/tree/main", "org/name"),
        ("org/name:file.gguf", "org/name:file.gguf"),
    ],
)
def test_the_name_that_clients_use(model: str, name: str) -> None:
    assert ModelToBuild(model=model).name == name


def test_local_models_are_named_by_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One path however it is written: one bundle."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.chdir(tmp_path)
    spelled = [ModelToBuild(model=text) for text in ("./tiny", str(tmp_path / "tiny"))]
    assert {model.name for model in spelled} == {"tiny"}
    assert len({model.out_dir for model in spelled}) == 1
    assert ModelToBuild(model="tiny.gguf").name == "tiny"


@pytest.mark.parametrize(
    ("fields", "device", "ids", "error", "words"),
    [
        ({"tp": 9}, None, None, UsageError, "--tp is 9"),
        ({"dtype": "f8"}, None, None, UsageError, "--dtype is 'f8'"),
        ({"weights_dtype": "i8"}, None, None, UsageError, "--weights-dtype is 'i8'"),
        ({"cache_policy": "no"}, None, None, UsageError, "--cache-policy is 'no'"),
        ({}, "hip", None, UsageError, "--device hip needs --compile-target"),
        ({}, "rocm", None, DeviceError, "no device driver 'rocm'"),
        ({"tp": 2}, None, (0,), DeviceError, "names 1 devices"),
        ({"compile_target": "gfx942"}, "hip", (0,), DeviceError, "hip"),
    ],
)
def test_refused_before_anything_is_compiled(
    fields: dict[str, Any],
    device: str | None,
    ids: tuple[int, ...] | None,
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error) as caught:
        ModelToBuild(model="m", **fields).check(device, ids)
    assert words in str(caught.value)


def test_without_the_compile_side_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where an earlier build has left a bundle, that it can be served as it is."""
    monkeypatch.setattr(packages, "is_installed", lambda module: module != "torch")
    model = ModelToBuild(model="org/name", cache_dir=tmp_path)
    with pytest.raises(CompileError, match=r"needs torch, .* pip install 'shark-llm\[compile\]'$"):
        model.check(None, None)
    model.out_dir.mkdir(parents=True)
    with pytest.raises(CompileError, match=f"--artifacts-dir {model.out_dir}$"):
        model.check(None, None)
