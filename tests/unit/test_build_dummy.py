"""Dummy weights, recipes, and what cannot fit its GPU: plans and bundles around a fake compiler."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_harness import FakeCompileSide, ListReporter, settings
from shark_llm import build_work
from shark_llm.artifacts.bundle import open_bundle
from shark_llm.build import build, plan_build
from shark_llm.cli import compile as compile_cli
from shark_llm.errors import CapacityError, UsageError
from shark_llm.golden_run import why_not_here
from tiny import tiny_config, write_tiny

LLAMA_405B = Path(__file__).parents[1] / "published_configs" / "meta-llama--Llama-3.1-405B.json"


@pytest.fixture
def compile_side(monkeypatch: pytest.MonkeyPatch) -> FakeCompileSide:
    """With the true answer to whether a golden check can run: reading 405B back would not end."""
    fake = FakeCompileSide.install(monkeypatch)
    monkeypatch.setattr(build_work, "why_not_here", why_not_here)
    return fake


@pytest.fixture
def _own_sigterm() -> Iterator[None]:
    """The command handles SIGTERM; the test process wants its own back."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def run(*argv: object) -> int:
    """The exit code of shark-compile."""
    with pytest.raises(SystemExit) as caught:
        compile_cli.main([str(argument) for argument in argv])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_a_bundle_from_config_json_alone(compile_side: FakeCompileSide, tmp_path: Path) -> None:
    """Full size in kilobytes, and marked in the manifest."""
    result = build(
        settings(LLAMA_405B, tmp_path / "b", weights="dummy", target="gfx942", tp=8),
        ListReporter(),
    )
    bundle = open_bundle(tmp_path / "b", verify="digests")
    assert bundle.manifest.weights == result.manifest.weights == "dummy"
    assert bundle.manifest.golden is None
    assert sum(path.stat().st_size for path in bundle.archives) < 4 << 20
    assert compile_side.compiles == 1


def test_dummy_and_real_weights_are_not_taken_for_each_other(
    compile_side: FakeCompileSide, tmp_path: Path
) -> None:
    """They share the module; each other's archives never."""
    model, out = write_tiny(tmp_path / "t0"), tmp_path / "b"
    build(settings(model, out, verify=False), ListReporter())
    reporter = ListReporter()
    build(settings(model, out, weights="dummy"), reporter)
    assert reporter.stage_note("shard") == "dummy weights"
    assert compile_side.compiles == 1
    assert open_bundle(out, verify="digests").manifest.weights == "dummy"
    assert build(settings(model, out, weights="dummy"), ListReporter()).reused
    assert not build(settings(model, out, verify=False), ListReporter()).reused
    assert open_bundle(out, verify="digests").manifest.weights == "checkpoint"


def test_a_gguf_file_has_no_config_json(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"--weights dummy needs a config\.json, and m has none"):
        plan_build(settings(tmp_path / "m.gguf", tmp_path / "b", weights="dummy"), ListReporter())


def test_what_cannot_fit_its_gpu_is_refused_unless_forced(tmp_path: Path) -> None:
    ask = settings(LLAMA_405B, tmp_path / "b", weights="dummy", target="gfx942", tp=4)
    with pytest.raises(CapacityError, match=r"least tp that fits is 5.*--force builds it all the"):
        plan_build(ask, ListReporter())
    reporter = ListReporter()
    forced = settings(
        LLAMA_405B, tmp_path / "b", weights="dummy", target="gfx942", tp=4, force=True
    )
    plan_build(forced, reporter)
    assert [note for note in reporter.notes if note.startswith("forced: tp 4 does not fit mi300x")]
    shorter = settings(
        LLAMA_405B,
        tmp_path / "b",
        weights="dummy",
        target="gfx942",
        tp=4,
        max_model_len=1024,
    )
    assert plan_build(shorter, ListReporter()).plan.max_model_len == 1024


def test_another_gpu_has_other_memory(compile_side: FakeCompileSide, tmp_path: Path) -> None:
    fields = {"weights": "dummy", "target": "gfx942", "tp": 4}
    plan = plan_build(settings(LLAMA_405B, tmp_path / "b", gpu="mi325x", **fields), ListReporter())
    assert plan.plan.device.num_bytes == 256 << 30
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    build(settings(tmp_path, tmp_path / "b", gpu="mi325x", **fields), ListReporter())
    assert open_bundle(tmp_path / "b").manifest.target.memory_bytes == 256 << 30
    with pytest.raises(UsageError, match="mi250x is a gfx90a"):
        plan_build(settings(LLAMA_405B, tmp_path / "b", gpu="mi250x", **fields), ListReporter())


@pytest.mark.usefixtures("_own_sigterm")
def test_a_recipe_gives_the_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(LLAMA_405B.read_bytes())
    flags = ("--recipe", "llama-3.1-405b", "--hf-model", tmp_path, "--weights", "dummy")
    assert run(*flags, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "gfx942 (AMD Instinct MI300X, MI300A, MI325X), tp 8, bf16, pages of 16, up to 131" in out
    assert "fetch    nothing: the weights are dummies" in out
    assert "note" not in out
    assert run(*flags, "--dry-run", "--tp", "4", "--dtype", "f32", "--force") == 0
    out = capsys.readouterr().out
    assert "tp 4, f32, pages of 16" in out
    assert "the recipe is for tp 5 to 8, not for tp 4" in out


@pytest.mark.usefixtures("_own_sigterm")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--recipe", "llama-9", "--dry-run"], "no such recipe: 'llama-9'"),
        (["--dry-run"], "or a --recipe"),
        (["--hf-model", "m", "--weights", "none", "--dry-run"], "one of checkpoint, dummy"),
        (["--hf-model", "m", "--gpu", "mi300x", "--dry-run"], "mi300x is a gfx942"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert run(*argv) == 2
    assert message in capsys.readouterr().err
